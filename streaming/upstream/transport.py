"""The HTTP client under a chat attempt, and what its errors are called (docs/architecture.md, Chat).

No environment, no redirects, no time limits: the watchdog is the one owner of time.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import cache

import httpcore2
import httpx2

from embeddings.providers.cookies import no_cookies
from embeddings.timeouts import ETIMEDOUT
from streaming.upstream.connections import Backend
from streaming.upstream.errors import ChatStreamError, ProtocolError, TransportError
from streaming.upstream.retry import causes, first_transport_code

ERROR_BODY_MAX_BYTES = 64 * 1024
_KEPT_CONNECTIONS, _KEPT_S = 32, 5.0
_ECONNRESET = "ECONNRESET"
_READABLE = frozenset({"", "identity", "gzip", "deflate"})
_KINDS = {"ECONNREFUSED": "connection_refused", ETIMEDOUT: "connection_timeout"}


def http_client() -> httpx2.AsyncClient:
    """A client that sends nothing which its caller did not ask for, and holds little of what an error reply says."""
    return httpx2.AsyncClient(
        transport=_Transport(),
        trust_env=False,
        follow_redirects=False,
        timeout=None,
        cookies=no_cookies(),
        headers={"Accept-Encoding": "identity"},
    )


def typed_transport_error(error: Exception) -> ChatStreamError:
    """What a connection's failure is called: by its types and error numbers, its causes' included."""
    chain = list(causes(error, with_contexts=True))
    detail = f"the connection failed: {type(chain[-1]).__name__}"
    code = first_transport_code(chain)
    if _any(chain, httpx2.PoolTimeout):
        return TransportError("pool_timeout", "our own connection pool had no connection free")
    if code is not None:
        return TransportError(_KINDS.get(code, "connection_reset"), detail, transport_code=code)
    if _any(chain, httpx2.DecodingError):
        return ProtocolError("content_encoding", "the stream's content encoding is broken")
    if _any(chain, ssl.SSLError):
        return TransportError("tls_failed", detail)
    if _any(chain, httpx2.TimeoutException):
        return TransportError("connection_timeout", detail, transport_code=ETIMEDOUT)
    if _any(chain, httpx2.RemoteProtocolError):
        return TransportError("disconnected", detail, transport_code=_ECONNRESET)
    if _any(chain, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError):
        return TransportError("connection_reset", detail, transport_code=_ECONNRESET)
    return TransportError("unreachable" if _any(chain, httpx2.ConnectError) else "not_sent", detail)


def shut_down(response: httpx2.Response) -> None:
    """Ends the response's connection, now, for both sides."""
    stream = response.extensions.get("network_stream")
    abort = stream.get_extra_info("abort") if stream is not None else None
    if abort is not None:
        abort()


def unreadable_encoding(response: httpx2.Response) -> str:
    """The content encoding where we cannot undo it, else empty. None was asked for; the common ones are undone."""
    named = response.headers.get("content-encoding", "").lower()
    return "" if {name.strip() for name in named.split(",")} <= _READABLE else named


async def read_prefix(response: httpx2.Response, limit_bytes: int) -> bytes:
    """The first bytes of a body."""
    prefix = b""
    async for part in response.aiter_bytes():
        prefix += part[:limit_bytes]
        if len(prefix) >= limit_bytes:
            break
    return prefix[:limit_bytes]


@cache
def _tls() -> ssl.SSLContext:
    """Reading the authorities takes 40 ms, in which the loop would stand still: once is enough."""
    return httpx2.create_ssl_context(trust_env=False)


class _Transport(httpx2.AsyncHTTPTransport):
    """On connections of our own. Cuts the body of an error reply, decoded: the SDK reads it whole, and believes any
    charset."""

    def __init__(self) -> None:
        super().__init__(verify=_tls(), trust_env=False)
        # The transport takes no backend; its pool does.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=_tls(),
            max_connections=None,
            max_keepalive_connections=_KEPT_CONNECTIONS,
            keepalive_expiry=_KEPT_S,
            network_backend=Backend(),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if 200 <= response.status_code < 300:
            return response
        headers = httpx2.Headers(response.headers.raw)
        for name in ("content-encoding", "content-length", "content-type"):
            headers.pop(name, None)
        return httpx2.Response(
            response.status_code, headers=headers, stream=_Cut(response), extensions=response.extensions
        )


class _Cut(httpx2.AsyncByteStream):
    """The first bytes of an error reply's body; none where its encoding cannot be read: the status says enough."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = 0 if unreadable_encoding(self._response) else ERROR_BODY_MAX_BYTES
        async with aclosing(self._response.aiter_bytes()) as parts:
            with suppress(httpx2.DecodingError):
                while left > 0 and (part := await anext(parts, b"")):
                    yield part[:left]
                    left -= len(part)

    async def aclose(self) -> None:
        await self._response.aclose()


def _any(chain: list[BaseException], *types: type[BaseException]) -> bool:
    return any(isinstance(error, types) for error in chain)
