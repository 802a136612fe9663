"""One HTTP request of an embedding call, for every provider kind: its client, its deadline, its failures by type.

Nothing here is decided by an error's text. A provider passes the type of its own timeout, and gets back typed errors.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from embeddings.errors import KeptConnectionLost, OwnTimeout, ProviderUnreachable, ReplyRefused, causes
from embeddings.providers.http_base import DECODABLE_ENCODINGS, ModelServerClient, bounded, tls_context
from embeddings.timeouts import ETIMEDOUT, ProviderTimeoutError

if TYPE_CHECKING:
    from embeddings.providers.base import EmbeddingCall

T = TypeVar("T")
TimedOut = Callable[[str], ProviderTimeoutError]

REPLY_BYTES_MAX = 256 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
KEPT_CONNECTIONS = 8
# A deadline that fires this late was not reached by the server's silence: our own loop was blocked.
LOOP_LAG_MAX_S = 1.0

_departing: ContextVar[_Departing | None] = ContextVar("departing", default=None)


class HttpClient(ModelServerClient):
    """The client of one provider's embedding calls."""

    def __init__(self) -> None:
        self._bounded = _BoundedTransport(
            verify=tls_context(trust_env=True),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
        )
        super().__init__(self._bounded, ", ".join(DECODABLE_ENCODINGS))

    async def retire(self) -> None:
        """Closes the connections once no request is in flight on them.

        The client stays usable: a thread that fetched its adapter before the configuration changed may be about to send
        a call, and a call may be pausing between two attempts. Connections of such late requests are not kept.
        """
        self._bounded.is_retired = True
        while not self._bounded.is_idle.is_set():
            await self._bounded.is_idle.wait()
        await self._bounded.aclose()


def watch_departure(call: EmbeddingCall) -> None:
    """Ties the requests that this coroutine sends from now on to the call: none is sent while the call is held, and the
    call's `left` is set once the body of one has been sent.
    """
    _departing.set(_Departing(call.left, call.held))


class _Departing:
    """A call whose requests may have to wait before they are sent."""

    def __init__(self, left: Event, held: asyncio.Event | None) -> None:
        self.left = left
        self._held = held
        self._deadline: tuple[asyncio.Timeout, float] | None = None

    def deadline(self, deadline_s: float) -> asyncio.Timeout:
        """The scope of one request's deadline. A held call's deadline starts when the call is released."""
        if self._held is None or self._held.is_set():
            return asyncio.timeout(deadline_s)
        scope = asyncio.timeout(None)
        self._deadline = (scope, deadline_s)
        return scope

    async def wait_released(self) -> None:
        """Returns once the call is no longer held, and starts its deadline."""
        if self._held is not None:
            await self._held.wait()
        if self._deadline is not None:
            scope, deadline_s = self._deadline
            self._deadline = None
            scope.reschedule(asyncio.get_running_loop().time() + deadline_s)


def timeouts(deadline_s: float) -> httpx2.Timeout:
    """The bound on each single wait; `within_deadline` sets the total deadline. Waiting for our own pool has no bound."""
    return httpx2.Timeout(deadline_s, connect=min(CONNECT_TIMEOUT_S, deadline_s), pool=None)


async def within_deadline(request: Coroutine[Any, Any, T], deadline_s: float, timed_out: TimedOut) -> T:
    """One HTTP request under its total deadline: a server that drips its body never exceeds a read timeout.

    Raises `timed_out(...)`, or OwnTimeout where this process was blocked past the deadline.
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
    chain = list(causes(error, with_contexts=True))
    if any(isinstance(cause, httpx2.PoolTimeout) for cause in chain):
        return OwnTimeout("our own connection pool had no connection free")
    if any(isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT for cause in chain):
        return ProviderTimeoutError("the connection timed out", code=ETIMEDOUT)
    if any(isinstance(cause, httpx2.TimeoutException) for cause in chain):
        return timed_out(f"no answer within {deadline_s:g} s")
    for cause in chain:
        if isinstance(cause, ReplyRefused):
            return cause
    if any(isinstance(cause, httpx2.DecodingError) for cause in chain):
        return ReplyRefused("the reply's content encoding is broken")
    lost = any(isinstance(cause, httpx2.TransportError) and _was_kept(cause) for cause in chain)
    return (KeptConnectionLost if lost else ProviderUnreachable)(
        f"no answer from the provider: {type(chain[-1]).__name__}"
    )


def _was_kept(error: httpx2.TransportError) -> bool:
    """Whether the request was sent on a reused connection, and no head of a reply came."""
    try:
        trace = error.request.extensions.get("trace")
    except RuntimeError:  # The error has no request.
        return False
    return isinstance(trace, _Trace) and trace.is_unanswered_on_kept


class _Trace:
    """The trace of one request (`request.extensions["trace"]`). Closes the connection of a TLS handshake that failed or
    was cancelled, which the HTTP client leaves open, and sets `left` once the body of the request has been sent.

    `is_unanswered_on_kept`: the request was sent on a reused connection, and no head of a reply has come. The server may
    have closed that connection at the same moment.
    """

    def __init__(self, left: Event | None) -> None:
        self._left = left
        self._connected: Any = None
        self._is_fresh = self._is_sent = self._is_answered = False

    @property
    def is_unanswered_on_kept(self) -> bool:
        return self._is_sent and not self._is_fresh and not self._is_answered

    async def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._connected = info["return_value"]
            self._is_fresh = True
        elif event == "http11.send_request_headers.started":
            self._is_sent = True
        elif event == "http11.receive_response_headers.complete":
            self._is_answered = True
        elif event == "connection.start_tls.failed" and self._connected is not None:
            await self._connected.aclose()
        elif event.endswith("send_request_body.complete") and self._left is not None:
            self._left.set()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Refuses a decoded body over `REPLY_BYTES_MAX`, of an error reply too: a server's reply never fills our memory.

    `is_idle` is set while no request is held and no response is open.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_retired = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._open = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.is_retired:
            request.headers["Connection"] = "close"
        self._open += 1
        self.is_idle.clear()
        with ExitStack() as on_failure:
            on_failure.callback(self._count_ended)
            departing = _departing.get()
            if departing is not None:
                await departing.wait_released()
            request.extensions["trace"] = _Trace(None if departing is None else departing.left)
            response = await super().handle_async_request(request)
            on_failure.pop_all()
        return bounded(response, REPLY_BYTES_MAX, cut=False, on_closed=self._count_ended)

    def _count_ended(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.is_idle.set()
