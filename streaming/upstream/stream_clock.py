"""The deadlines of one attempt: which budget runs out next, when, and with which error (docs/architecture.md, Chat).

The watchdog's policy, pure: it uses no event loop and reads no clock; its caller passes the times.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from streaming.upstream.budgets import ChatBudgets
from streaming.upstream.errors import (
    FinishGraceElapsedError,
    StreamInactivityTimeoutError,
    StreamLifetimeExceededError,
    StreamRequestTimeoutError,
    StreamTimeoutError,
)

DONE_GRACE_S = 0.050
NEVER = float("inf")


class Phase(Enum):
    """What an attempt is waiting for."""

    REQUEST = "request"
    FIRST_CONTENT = "first_content"
    STREAMING = "streaming"
    FINISHING = "finishing"


class StreamClock:
    """The deadlines of one attempt, in seconds of waiting for upstream; the consumer's time does not count.

    Facts come in through `headers_arrived`, `bytes_arrived`, `chunk_arrived`, `content_arrived`, `finished` and `done`;
    `begin_wait` and `end_wait` bracket every wait with monotonic times.
    """

    __slots__ = (
        "_began",
        "_byte_mark",
        "_bytes_since_chunk",
        "_chunk_mark",
        "_first_content_s",
        "_grace_s",
        "_idle_s",
        "_keepalive_s",
        "_lifetime_s",
        "_phase_mark",
        "_request_s",
        "_waited",
        "bytes_received",
        "chunks_received",
        "first_content_ms",
        "longest_gap_ms",
        "phase",
    )

    def __init__(self, budgets: ChatBudgets) -> None:
        self._request_s = _seconds(budgets.request_timeout_ms)
        self._first_content_s = _seconds(budgets.stream_first_content_timeout_ms)
        self._idle_s = _seconds(budgets.stream_idle_timeout_ms)
        self._keepalive_s = _seconds(budgets.stream_keepalive_timeout_ms)
        self._lifetime_s = _seconds(budgets.stream_lifetime_ms)
        self._grace_s = _seconds(budgets.finish_grace_ms)
        self.phase = Phase.REQUEST
        self.bytes_received = 0
        self.chunks_received = 0
        self.first_content_ms: int | None = None
        self.longest_gap_ms = 0
        self._waited = 0.0
        self._began: float | None = None
        self._phase_mark = self._byte_mark = self._chunk_mark = 0.0
        self._bytes_since_chunk = False

    def headers_arrived(self) -> None:
        """The reply is a stream; the wait for its first content begins."""
        self.phase = Phase.FIRST_CONTENT
        self._phase_mark = self._byte_mark = self._chunk_mark = self._waited

    def bytes_arrived(self, count: int) -> None:
        """Bytes of the body: the stream is not silent, though it may be making no progress."""
        self.bytes_received += count
        self._byte_mark = self._waited
        self._bytes_since_chunk = True

    def chunk_arrived(self) -> None:
        """A chunk, whatever is in it: progress."""
        self.chunks_received += 1
        gap_ms = int((self._waited - self._chunk_mark) * 1000)
        if gap_ms > self.longest_gap_ms:
            self.longest_gap_ms = gap_ms
        self._chunk_mark = self._waited
        self._bytes_since_chunk = False

    def content_arrived(self) -> None:
        """Delivered content: ends the wait for the first content."""
        if self.first_content_ms is None:
            self.first_content_ms = int(self._waited * 1000)
        if self.phase is Phase.FIRST_CONTENT:
            self.phase = Phase.STREAMING

    def finished(self, *, said_more: bool = False) -> None:
        """Every choice has its finish reason: only usage may still come.

        Some servers put a finish reason into every chunk: content after one restarts the grace, within the lifetime.
        """
        if self.phase is not Phase.FINISHING or (said_more and self._waited < self._lifetime_s):
            self.phase = Phase.FINISHING
            self._phase_mark = self._waited

    def unfinished(self) -> None:
        """A choice has no finish reason: an answer that looked finished is not."""
        if self.phase is Phase.FINISHING:
            self.phase = Phase.FIRST_CONTENT if self.first_content_ms is None else Phase.STREAMING

    def done(self) -> None:
        """`[DONE]` came: wait briefly for the body's end, so that the connection can be reused."""
        self.phase = Phase.FINISHING
        self._phase_mark = self._waited
        self._grace_s = min(self._grace_s, DONE_GRACE_S)

    def begin_wait(self, now: float) -> float:
        """Starts charging. The monotonic time at which the next budget runs out, or infinity."""
        self._began = now
        return now + (self._next_expiry()[0] - self._waited)

    def end_wait(self, now: float) -> None:
        """Stops charging."""
        if self._began is not None:
            self._waited += now - self._began
            self._began = None

    def waited_ms(self, now: float) -> int:
        """How long this attempt has waited for upstream, the current wait included."""
        return int(self._waited_by(now) * 1000)

    def quiet_ms(self, now: float) -> int:
        """For how long no chunk has come, the current wait included."""
        return int((self._waited_by(now) - self._chunk_mark) * 1000)

    def expiry_error(self, now: float) -> StreamTimeoutError:
        """The error of the budget that runs out first, as of a moment at which it has."""
        waited = self._waited_by(now)
        _, error_type, budget_s = self._next_expiry()
        facts: dict[str, Any] = {
            "budget_ms": 0 if budget_s == NEVER else round(budget_s * 1000),
            "chunks": self.chunks_received,
            "bytes_received": self.bytes_received,
            "lifetime_ms": round(waited * 1000),
        }
        if error_type is StreamInactivityTimeoutError:
            kind = self._kind_of_inactivity(waited, budget_s)
            return StreamInactivityTimeoutError(f"{_INACTIVITY[kind]} for {facts['budget_ms']} ms", kind=kind, **facts)
        return error_type(f"{_EXPIRED[error_type]} {facts['budget_ms']} ms", **facts)

    def _waited_by(self, now: float) -> float:
        return self._waited if self._began is None else self._waited + now - self._began

    def _next_expiry(self) -> tuple[float, type[StreamTimeoutError], float]:
        """When, in seconds of waiting, which budget runs out, and its size."""
        phase = self.phase
        error_type: type[StreamTimeoutError] = StreamInactivityTimeoutError
        if phase is Phase.STREAMING:
            at, budget = self._byte_mark + self._idle_s, self._idle_s
            if self._bytes_since_chunk and self._chunk_mark + self._keepalive_s < at:
                at, budget = self._chunk_mark + self._keepalive_s, self._keepalive_s
        elif phase is Phase.FIRST_CONTENT:
            at, budget = self._phase_mark + self._first_content_s, self._first_content_s
        elif phase is Phase.REQUEST:
            at, error_type, budget = self._request_s, StreamRequestTimeoutError, self._request_s
        else:
            return self._phase_mark + self._grace_s, FinishGraceElapsedError, self._grace_s
        if self._lifetime_s < at:
            return self._lifetime_s, StreamLifetimeExceededError, self._lifetime_s
        return at, error_type, budget

    def _kind_of_inactivity(self, waited: float, budget_s: float) -> str:
        if self.phase is Phase.STREAMING:
            return "keepalive" if self._bytes_since_chunk and waited - self._byte_mark < self._idle_s else "silent"
        # One role-only chunk at the start should not name a stall that follows it, so only the second half of the
        # budget counts.
        if waited - self._byte_mark >= budget_s / 2:
            return "silent"
        return "keepalive" if waited - self._chunk_mark >= budget_s / 2 else "empty_chunks"


def _seconds(budget_ms: int) -> float:
    return budget_ms / 1000 if budget_ms > 0 else NEVER


_INACTIVITY = {
    "silent": "no stream activity",
    "keepalive": "kept alive by comments, but no chunk",
    "empty_chunks": "chunks, but no content",
}
_EXPIRED: dict[type[StreamTimeoutError], str] = {
    StreamRequestTimeoutError: "no answer to the request within",
    StreamLifetimeExceededError: "the attempt waited for longer than its lifetime of",
    FinishGraceElapsedError: "nothing followed the finish within",
}
