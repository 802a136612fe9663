"""The HTTP client under a chat attempt, and the types of its errors (docs/architecture.md, Chat).

It has no time limits: the watchdog alone measures time.
"""

from __future__ import annotations

import ssl

import httpcore2
import httpx2

from embeddings.errors import causes
from embeddings.providers.http_base import ModelServerClient, bounded, tls_context
from embeddings.timeouts import ETIMEDOUT
from streaming.upstream.connections import Backend
from streaming.upstream.errors import ChatStreamError, ProtocolError, TransportError
from streaming.upstream.retry import first_transport_code

ERROR_BODY_MAX_BYTES = 64 * 1024
_KEPT_CONNECTIONS, _KEPT_S = 32, 5.0
_ECONNRESET = "ECONNRESET"
_KINDS = {"ECONNREFUSED": "connection_refused", ETIMEDOUT: "connection_timeout"}


def http_client() -> httpx2.AsyncClient:
    """A client for streams: it asks for no compression, and reads only the start of an error reply."""
    return ModelServerClient(_Transport(), accept_encoding="identity")


def typed_transport_error(error: Exception) -> ChatStreamError:
    """The typed error of a failed connection, by the types and error numbers of it and its causes."""
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
    """Closes the response's connection at once."""
    stream = response.extensions.get("network_stream")
    abort = stream.get_extra_info("abort") if stream is not None else None
    if abort is not None:
        abort()


class _Transport(httpx2.AsyncHTTPTransport):
    """On connections of our own (decision 10). Cuts the body of an error reply, which the SDK would read whole."""

    def __init__(self) -> None:
        tls = tls_context(trust_env=False)
        super().__init__(verify=tls, trust_env=False)
        # The transport takes no backend; its pool does.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=None,
            max_keepalive_connections=_KEPT_CONNECTIONS,
            keepalive_expiry=_KEPT_S,
            network_backend=Backend(),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if 200 <= response.status_code < 300:
            return response
        return bounded(response, ERROR_BODY_MAX_BYTES, cut=True)


def _any(chain: list[BaseException], *types: type[BaseException]) -> bool:
    return any(isinstance(error, types) for error in chain)
