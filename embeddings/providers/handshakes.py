"""What the HTTP client forgets: a connection whose TLS handshake is broken off stays open, held by nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handshakes:
    """The trace of one request (`request.extensions["trace"]`): closes what the client forgets.

    `note` hears the name of every event.
    """

    def __init__(self, note: Callable[[str], None] = lambda event: None) -> None:
        self._note = note
        self._connected: Any = None

    async def __call__(self, event: str, info: dict[str, Any]) -> None:
        self._note(event)
        if event == "connection.connect_tcp.complete":
            self._connected = info["return_value"]
        elif event == "connection.start_tls.failed" and self._connected is not None:
            await self._connected.aclose()
