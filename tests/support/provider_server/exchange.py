"""A call while it is answered: what a reply may do to it, and the gates it may be held at."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .log import Call, CallLog
from .wire import Connection, ServerCloses

_GATE_POLL = 0.005


class Outlet(Protocol):
    def __call__(self, data: bytes, more: bool = False) -> None: ...


class Exchange:
    """One call and its connection. Each method raises ClientClosed or ServerCloses when the exchange is over."""

    def __init__(
        self, call: Call, connection: Connection, log: CallLog, default: "Reply", dimensions: int = 384
    ) -> None:
        self.call = call
        self.default = default
        self.dimensions = dimensions
        self.outlet: Outlet = connection.send
        self.keep_alive = call.headers.get("connection", "").lower() != "close"
        self._connection = connection
        self._log = log

    def send(self, data: bytes) -> None:
        """Send a part of the answer."""
        self.outlet(data)

    def finish(self, data: bytes) -> None:
        """Send the last part. The call is logged as replied before the byte that lets its client go on."""
        self.outlet(data[:-1], more=True)
        self._log.end(self.call.number, "replied")
        self.outlet(data[-1:])

    def wait(self, seconds: float | None) -> None:
        """Stay silent for `seconds`; None is until the client closes or the server stops."""
        self._connection.wait(seconds)

    def wait_since_arrival(self, seconds: float) -> None:
        """Wait until `seconds` after the call's arrival, so that our own work counts as part of a latency."""
        self.wait(self.call.arrived_at + seconds - time.monotonic())

    def close(self) -> None:
        """End the connection with a FIN."""
        raise ServerCloses

    def reset(self) -> None:
        """End the connection with a RST."""
        self._connection.reset()
        raise ServerCloses


@dataclass(frozen=True)
class Reply:
    """What a call gets: a name for failure messages, and how it is played."""

    name: str
    play: Callable[[Exchange], None]

    def __repr__(self) -> str:
        return self.name


class Gate:
    """Holds calls until it is released; a held call still notices its client's close."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived = 0
        self._passes = 0.0

    @property
    def arrived(self) -> int:
        """How many calls have ever reached this gate."""
        return self._arrived

    def wait_arrived(self, n: int = 1, timeout: float = 30.0) -> None:
        """Return once `n` calls have reached the gate; AssertionError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= n, timeout):
                raise AssertionError(f"{self._arrived} of {n} calls reached the gate within {timeout} s")

    def release(self, n: int | None = None) -> None:
        """Let `n` calls through; None opens the gate for good."""
        with self._changed:
            self._passes += float("inf") if n is None else n

    def hold(self, exchange: Exchange) -> None:
        """Keep `exchange` here until it may pass."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
        while not self._take_pass():
            exchange.wait(_GATE_POLL)

    def _take_pass(self) -> bool:
        with self._changed:
            if self._passes < 1:
                return False
            self._passes -= 1
            return True
