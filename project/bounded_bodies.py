"""Refuses oversized request bodies as they arrive, before anything is stored or parsed (ASGI)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# Django and uvicorn declare different types for the same arguments.
App = Callable[[Any, Any, Any], Awaitable[None]]


# A client may read the reply only after sending its body: read and discard up to this many bytes.
DISCARDED_BYTES_MAX = 64 * 1024 * 1024


class _TooLarge(Exception):
    def __init__(self, *, has_more: bool) -> None:
        self.has_more = has_more


def bounded_bodies(app: App, limit_bytes: int) -> App:
    """The application with a limit on request bodies: 413 in OpenAI's format, with or without a Content-Length."""

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        lengths = [value for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
        if lengths and int(lengths[0]) > limit_bytes:
            await _discard(receive)
            return await _refuse(send, limit_bytes)
        try:
            await app(scope, _counting(receive, limit_bytes), send)
        except _TooLarge as too_large:
            # If the body is complete there is nothing to discard.
            if too_large.has_more:
                await _discard(receive)
            await _refuse(send, limit_bytes)

    return bounded


def _counting(receive: Receive, limit_bytes: int) -> Receive:
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit_bytes:
            raise _TooLarge(has_more=message.get("more_body", False))
        return message

    return counted


async def _refuse(send: Send, limit_bytes: int) -> None:
    message = f"The request is larger than {limit_bytes} bytes."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "request_too_large"}
    body = json.dumps({"error": error}).encode()
    # The rest of the body stays unread, so the connection cannot be reused.
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _discard(receive: Receive) -> None:
    left = DISCARDED_BYTES_MAX
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return
