"""Every HTTP client of a model server, for embeddings and for chat: what it trusts, sends, keeps and reads.

A client takes no proxy and no key from the environment, follows no redirect (a tenant's text goes to the configured
address alone), keeps no cookie (one client serves every tenant of a provider) and has no time limits of its own.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx2

from embeddings.errors import ReplyRefused

# The content encodings that are decoded piece by piece, so that a small body cannot fill the memory.
DECODABLE_ENCODINGS = ("gzip", "deflate")


class ModelServerClient(httpx2.AsyncClient):
    """A client over `transport`; each request brings its own time limits, or its caller does."""

    def __init__(self, transport: httpx2.AsyncBaseTransport, accept_encoding: str) -> None:
        super().__init__(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=None,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            headers={"Accept-Encoding": accept_encoding},
        )


@cache
def tls_context(*, trust_env: bool) -> ssl.SSLContext:
    """The system's authorities; with `trust_env`, those of SSL_CERT_FILE or SSL_CERT_DIR instead where one is set.

    Cached: reading the authorities takes 40 ms, during which the loop would stand still.
    """
    return httpx2.create_ssl_context(trust_env=trust_env)


def unreadable_encoding(response: httpx2.Response) -> str:
    """The reply's content encoding if it cannot be decoded, else empty."""
    named = response.headers.get("content-encoding", "").lower()
    return "" if {name.strip() for name in named.split(",")} <= {"", "identity", *DECODABLE_ENCODINGS} else named


def bounded(
    response: httpx2.Response, limit_bytes: int, *, cut: bool, on_closed: Callable[[], None] = lambda: None
) -> httpx2.Response:
    """The response with a decoded body of at most `limit_bytes`: a longer one is cut, or raises ReplyRefused.

    The headers that described the body as it was sent are dropped, its charset too: readers would believe any.
    """
    headers = httpx2.Headers(response.headers.raw)
    for name in ("content-encoding", "content-length", "content-type"):
        headers.pop(name, None)
    body = _BoundedBody(response, limit_bytes, cut, on_closed)
    return httpx2.Response(response.status_code, headers=headers, stream=body, extensions=response.extensions)


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


class _BoundedBody(httpx2.AsyncByteStream):
    """A reply's body, decoded. In an error reply, what cannot be decoded is left out: the status is enough."""

    def __init__(
        self, response: httpx2.Response, limit_bytes: int, is_cut: bool, on_closed: Callable[[], None]
    ) -> None:
        self._response = response
        self._limit_bytes = limit_bytes
        self._is_cut = is_cut
        self._on_closed = on_closed
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit_bytes
        try:
            if unreadable_encoding(self._response):
                raise httpx2.DecodingError("an encoding that was not asked for")
            async with aclosing(self._response.aiter_bytes()) as parts:
                async for part in parts:
                    if len(part) > left and not self._is_cut:
                        raise ReplyRefused(f"the reply is over {self._limit_bytes} bytes")
                    yield part[:left]
                    left -= len(part)
                    if left <= 0 and self._is_cut:
                        return
        except httpx2.DecodingError:
            if self._response.is_success:
                raise

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_closed()
        await self._response.aclose()
