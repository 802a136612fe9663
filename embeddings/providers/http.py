"""What every kind's transport has in common: our own bounded HTTP client, its deadline, and its failures by type.

Nothing here is decided by an error's text. A provider hands in how its own timeout is called, and gets back typed errors.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from embeddings.errors import KeptConnectionLost, OwnTimeout, ProviderUnreachable, ReplyRefused
from embeddings.providers.cookies import no_cookies
from embeddings.providers.handshakes import Handshakes
from embeddings.timeouts import ETIMEDOUT, ProviderTimeoutError

if TYPE_CHECKING:
    from embeddings.providers.base import EmbeddingCall

T = TypeVar("T")
TimedOut = Callable[[str], ProviderTimeoutError]

REPLY_BYTES_MAX = 256 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
KEPT_CONNECTIONS = 8
# What we can undo piece by piece, and therefore bound.
_ENCODINGS = ("gzip", "deflate")
# A deadline that fires this late was not reached by the server's silence but by a loop of ours that stood still.
LOOP_LAG_MAX_S = 1.0

_departing: ContextVar[_Departing | None] = ContextVar("departing", default=None)


class HttpClient(httpx2.AsyncClient):
    """A client that reads no proxies or keys from the environment, and re-posts a tenant's text nowhere else."""

    def __init__(self) -> None:
        self._bounded = _BoundedTransport(
            verify=_ssl_context(),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
        )
        super().__init__(
            transport=self._bounded,
            trust_env=False,
            follow_redirects=False,
            timeout=None,
            cookies=no_cookies(),
            headers={"Accept-Encoding": ", ".join(_ENCODINGS)},
        )

    async def retire(self) -> None:
        """Closes the connections once no request is in flight on them.

        The client stays usable: a thread that fetched its adapter before the configuration changed may be about to send
        a call, and a call may be pausing between two attempts. Connections of such late requests are not kept.
        """
        self._bounded.is_retired = True
        while not self._bounded.nobody_out.is_set():
            await self._bounded.nobody_out.wait()
        await self._bounded.aclose()


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    # Reading the certificate store costs more than everything else about a client.
    return httpx2.create_ssl_context()


def watch_departure(call: EmbeddingCall) -> None:
    """The requests that this coroutine sends from now on are the call's: held before the wire while it is held, and
    its `left` is set once the body of one is out.
    """
    _departing.set(_Departing(call.left, call.held))


class _Departing:
    """A call on its way to the wire."""

    def __init__(self, left: Event, held: asyncio.Event | None) -> None:
        self.left = left
        self._held = held
        self._deadline: tuple[asyncio.Timeout, float] | None = None

    def deadline(self, deadline_s: float) -> asyncio.Timeout:
        """The scope of one request's deadline; that of a held one starts when it is let go."""
        if self._held is None or self._held.is_set():
            return asyncio.timeout(deadline_s)
        scope = asyncio.timeout(None)
        self._deadline = (scope, deadline_s)
        return scope

    async def let_go(self) -> None:
        """Returns when the call may leave."""
        if self._held is not None:
            await self._held.wait()
        if self._deadline is not None:
            scope, deadline_s = self._deadline
            self._deadline = None
            scope.reschedule(asyncio.get_running_loop().time() + deadline_s)


def timeouts(deadline_s: float) -> httpx2.Timeout:
    """Each gap's own bound; the total deadline is `within_deadline`'s. Our pool is never a reason to fail."""
    return httpx2.Timeout(deadline_s, connect=min(CONNECT_TIMEOUT_S, deadline_s), pool=None)


async def within_deadline(request: Coroutine[Any, Any, T], deadline_s: float, timed_out: TimedOut) -> T:
    """One HTTP request under its total deadline: a dripping body defeats a read timeout alone.

    Raises `timed_out(...)`, or OwnTimeout where this process stood still past the deadline.
    """
    departing = _departing.get()
    scope = departing.deadline(deadline_s) if departing else asyncio.timeout(deadline_s)
    try:
        async with scope:
            return await request
    except TimeoutError as error:
        lag = asyncio.get_running_loop().time() - (scope.when() or 0)
        if lag > LOOP_LAG_MAX_S:
            raise OwnTimeout("this process stood still past the call's deadline") from error
        raise timed_out(f"no complete reply within {deadline_s:g} s") from error


async def post_json(
    client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str], deadline_s: float
) -> httpx2.Response:
    """The response, read whole, whatever its status. Raises httpx2's own errors, for `of_transport`."""
    return await client.post(url, json=body, headers=dict(headers), timeout=timeouts(deadline_s))


def of_transport(error: Exception, deadline_s: float, timed_out: TimedOut) -> Exception:
    """The typed error of a request that got no whole answer; the caller raises it `from` the transport's own."""
    causes = list(_causes(error))
    if any(isinstance(cause, httpx2.PoolTimeout) for cause in causes):
        return OwnTimeout("our own connection pool had no connection free")
    if any(isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT for cause in causes):
        return ProviderTimeoutError("the connection timed out", code=ETIMEDOUT)
    if any(isinstance(cause, httpx2.TimeoutException) for cause in causes):
        return timed_out(f"no answer within {deadline_s:g} s")
    for cause in causes:
        if isinstance(cause, ReplyRefused):
            return cause
    if any(isinstance(cause, httpx2.DecodingError) for cause in causes):
        return ReplyRefused("the reply's content encoding is broken")
    lost = any(isinstance(cause, httpx2.TransportError) and _was_kept(cause) for cause in causes)
    return (KeptConnectionLost if lost else ProviderUnreachable)(
        f"no answer from the provider: {type(causes[-1]).__name__}"
    )


def retry_after_ms(headers: httpx2.Headers) -> int | None:
    """`Retry-After` in seconds or as a date; None where it is absent or makes no sense."""
    raw = headers.get("retry-after", "").strip()
    if raw.isdecimal() and raw.isascii():
        return int(raw[:9]) * 1000
    try:
        at = parsedate_to_datetime(raw)
    except (TypeError, ValueError, OverflowError):
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0, int((at - datetime.now(UTC)).total_seconds() * 1000))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _was_kept(error: httpx2.TransportError) -> bool:
    """Whether the request went out on a connection of an earlier one, and nothing of its answer came."""
    try:
        trace = error.request.extensions.get("trace")
    except RuntimeError:  # It knows no request.
        return False
    return isinstance(trace, Handshakes) and trace.is_unanswered_on_kept


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Refuses a body over `REPLY_BYTES_MAX` as sent or as decoded, on errors too: a server's reply never fills our memory.

    `nobody_out` is set while no request is held, or waits for its response to be closed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_retired = False
        self.nobody_out = asyncio.Event()
        self.nobody_out.set()
        self._out = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.is_retired:
            request.headers["Connection"] = "close"
        self._out += 1
        self.nobody_out.clear()
        try:
            trace = Handshakes()
            if departing := _departing.get():
                await departing.let_go()
                trace = Handshakes(_note_departure(departing.left))
            request.extensions["trace"] = trace
            response = await super().handle_async_request(request)
        except BaseException:
            self._one_is_back()
            raise
        headers = httpx2.Headers(response.headers.raw)
        # The body is given decoded; and a charset is believed by whoever reads words, though it may be none.
        for name in ("content-encoding", "content-length", "content-type"):
            headers.pop(name, None)
        stream = _BoundedStream(response, self._one_is_back)
        return httpx2.Response(response.status_code, headers=headers, stream=stream, extensions=response.extensions)

    def _one_is_back(self) -> None:
        self._out -= 1
        if self._out == 0:
            self.nobody_out.set()


class _BoundedStream(httpx2.AsyncByteStream):
    """A reply's body, decoded. Of an error's, what cannot be decoded is left out: the status says enough."""

    def __init__(self, response: httpx2.Response, on_closed: Callable[[], None]) -> None:
        self._response = response
        self._on_closed = on_closed
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            self._check_encoding()
            received = 0
            async with aclosing(self._response.aiter_bytes()) as parts:
                async for part in parts:
                    received += len(part)
                    if received > REPLY_BYTES_MAX:
                        raise ReplyRefused(f"the reply is over {REPLY_BYTES_MAX} bytes")
                    yield part
        except httpx2.DecodingError:
            if self._response.is_success:
                raise

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_closed()
        await self._response.aclose()

    def _check_encoding(self) -> None:
        named = self._response.headers.get("content-encoding", "").lower()
        if not {name.strip() for name in named.split(",")} <= {"", "identity", *_ENCODINGS}:
            raise httpx2.DecodingError("an encoding that was not asked for")


def _note_departure(left: Event) -> Callable[[str], None]:
    def note(event: str) -> None:
        if event.endswith("send_request_body.complete"):
            left.set()

    return note
