"""Whether a reply is an event stream: by its content type, or by its first bytes (docs/architecture.md, Chat).

Many servers send server-sent events as `text/plain`, as `application/json` or without a type.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import httpx2

from embeddings.providers.http_base import unreadable_encoding
from streaming.upstream.errors import ProtocolError, StreamInactivityTimeoutError

EVENT_STREAM = "text/event-stream"
# A page is never a stream: it is named without waiting for its body.
_PAGES = frozenset({"text/html", "application/xhtml+xml"})
_FIRST_BYTES = (b"data:", b"event:", b"id:", b"retry:", b":")
_BEFORE = b"\xef\xbb\xbf \t\r\n"
PREFIX_BYTES = 200
PREFIX_S = 0.5


async def stream_of(
    http: httpx2.Response, packets: AsyncGenerator[bytes, None], scrub: Callable[[str], str], key_bytes: int
) -> AsyncGenerator[bytes, None]:
    """The reply's packets. Raises ProtocolError for a reply that is no event stream, with the start of what it is.

    `key_bytes` is the length of the provider's key, which is scrubbed.
    """
    if unreadable := unreadable_encoding(http):
        raise ProtocolError("content_encoding", f"the stream is encoded as {scrub(unreadable)}, unasked")
    content_type = http.headers.get("content-type", "").partition(";")[0].partition(",")[0].strip().lower()
    begun = b""
    async with aclosing(packets):
        if content_type != EVENT_STREAM:
            begun, is_stream = await _begun(packets) if content_type not in _PAGES else (b"", False)
            if not is_stream:
                # Longer by a key, so that the key is whole where it is scrubbed: half a key would not be recognized.
                said = await _prefix(begun, packets, PREFIX_BYTES + key_bytes)
                raise ProtocolError(
                    "not_an_event_stream",
                    f"the provider answered {http.status_code} with {scrub(content_type) or 'no content type'}"
                    f" instead of an event stream: {scrub(said.decode('utf-8', 'replace'))[:PREFIX_BYTES]}",
                )
            yield begun
        async for packet in packets:
            yield packet


async def _begun(packets: AsyncGenerator[bytes, None]) -> tuple[bytes, bool]:
    """The body's first bytes, and whether a stream begins with them."""
    begun = b""
    async for packet in packets:
        begun += packet
        start = begun[: PREFIX_BYTES * 2].lstrip(_BEFORE)
        if start.startswith(_FIRST_BYTES):
            return begun, True
        if (start or len(begun) > PREFIX_BYTES) and not any(first.startswith(start) for first in _FIRST_BYTES):
            break
    return begun, False


async def _prefix(begun: bytes, packets: AsyncGenerator[bytes, None], limit_bytes: int) -> bytes:
    """The first bytes of a body that is no stream, as far as they come soon: they are only for the message."""
    try:
        async with asyncio.timeout(PREFIX_S):
            while len(begun) < limit_bytes:
                begun += await anext(packets)
    except (TimeoutError, StopAsyncIteration, httpx2.HTTPError, StreamInactivityTimeoutError):
        pass
    return begun[:limit_bytes]
