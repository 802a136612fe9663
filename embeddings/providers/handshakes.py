"""What the HTTP client forgets: a connection whose TLS handshake is broken off stays open, held by nobody; and whether
a request that failed had a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handshakes:
    """The trace of one request (`request.extensions["trace"]`): closes what the client forgets.

    `note` hears the name of every event. `is_unanswered_on_kept`: the request was sent on a connection that an earlier one
    had left open, and no head of an answer has come. The server may have closed it at the same moment.
    """

    def __init__(self, note: Callable[[str], None] = lambda event: None) -> None:
        self._note = note
        self._connected: Any = None
        self._is_fresh = self._is_sent = self._is_answered = False

    @property
    def is_unanswered_on_kept(self) -> bool:
        return self._is_sent and not self._is_fresh and not self._is_answered

    async def __call__(self, event: str, info: dict[str, Any]) -> None:
        self._note(event)
        if event == "connection.connect_tcp.complete":
            self._connected = info["return_value"]
            self._is_fresh = True
        elif event == "http11.send_request_headers.started":
            self._is_sent = True
        elif event == "http11.receive_response_headers.complete":
            self._is_answered = True
        elif event == "connection.start_tls.failed" and self._connected is not None:
            await self._connected.aclose()
