"""Records a running turn: joins close deltas, logs them, keeps the answer, and bounds its size.

It runs on the loop and never waits: the provider is read as fast as it sends (docs/architecture.md, Chat).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streaming.log import events
from streaming.log.answer import Answer, Delta, joined, joined_fields
from streaming.log.writer import TurnLog
from streaming.upstream.deltas import TEXT_FIELDS, ChatDelta

JOIN_S = 0.020
# Also bounded: log probabilities, and whatever else a provider sends beside the text.
LOG_BYTES_PER_CHARACTER = 16
LOG_BYTES_LEAST = 1_000_000

_NEVER = float("-inf")

Listener = Callable[[str, int, dict[str, Any]], None]


@dataclass
class _Pending:
    delta: Delta
    choice_fields: Delta
    chunk_fields: Delta


class Recorder:
    """The events of one turn. `listener`, if given, is called with each event as it is logged, on the loop."""

    def __init__(self, log: TurnLog, characters_max: int, listener: Listener | None = None) -> None:
        self.answer = Answer()
        self.is_full = False
        self._log = log
        self._room = characters_max
        self._taken = 0
        self._log_room = max(LOG_BYTES_LEAST, characters_max * LOG_BYTES_PER_CHARACTER)
        self._log_bytes = 0
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._attempt = 0
        self._pending: dict[int, _Pending] = {}
        self._reply_fields: Delta = {}
        self._logged_at = _NEVER
        self._timer: asyncio.Handle | None = None

    def event(self, kind: str, attempt: int, data: dict[str, Any]) -> None:
        """Logs an event, after the deltas before it."""
        self.flush()
        self._attempt = attempt
        self._append(kind, data)

    def delta(self, delta: ChatDelta) -> None:
        """Takes one delta. The first is logged at once, later ones at most every 20 ms, joined."""
        pending = self._pending.get(delta.index)
        if pending is not None and (both := joined(pending.delta, delta.said)) is not None:
            pending.delta = both
            pending.choice_fields = joined_fields(pending.choice_fields, delta.choice_fields)
            pending.chunk_fields = pending.chunk_fields | delta.chunk_fields
        else:
            if pending is not None:
                self._emit(delta.index)
            self._pending[delta.index] = _Pending(delta.said, delta.choice_fields, delta.chunk_fields)
        self._taken += _characters(delta.said)
        due = self._logged_at + JOIN_S
        # A reader waits for the first; and nothing may follow the delta that fills the room.
        if self._logged_at == _NEVER or self._taken >= self._room:
            self.flush()
        elif self._timer is None:
            is_due = self._loop.time() >= due
            self._timer = self._loop.call_soon(self.flush) if is_due else self._loop.call_at(due, self.flush)

    def flush(self) -> None:
        """Logs the deltas that are being joined."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            self._logged_at = self._loop.time()
            for choice in list(self._pending):
                self._emit(choice)

    def finish(self, choice: int, reason: str, fields: Delta | None = None) -> None:
        """Logs a choice's finish reason, with fields that the provider sent beside it."""
        data = {"choice": choice, "finish_reason": reason} | ({"fields": fields} if fields else {})
        self.event(events.FINISH, self._attempt, data)
        self.answer.finish(choice, reason, fields)

    def reply_fields(self, fields: Delta) -> None:
        """Logs the whole reply's own fields, as far as no delta has carried them."""
        if rest := {name: value for name, value in fields.items() if self._reply_fields.get(name) != value}:
            self.event(events.FIELDS, self._attempt, {"fields": rest})

    def _emit(self, choice: int) -> None:
        pending = self._pending.pop(choice)
        if self.is_full:
            return
        delta = self._fitting(pending.delta)
        data: dict[str, Any] = {"choice": choice, "offset": self.answer.offset(choice), "delta": delta}
        if pending.choice_fields:
            data["fields"] = pending.choice_fields
        if pending.chunk_fields:
            data["chunk_fields"] = pending.chunk_fields
            self._reply_fields |= pending.chunk_fields
        self.answer.add(choice, delta, pending.choice_fields)
        self._append(events.DELTA, data)
        self.is_full = self.answer.characters >= self._room or self._log_bytes > self._log_room

    def _fitting(self, delta: Delta) -> Delta:
        """The delta with its text cut to the room that is left."""
        left = self._room - self.answer.characters
        return {
            name: value[:left] if name in TEXT_FIELDS and isinstance(value, str) else value
            for name, value in delta.items()
        }

    def _append(self, kind: str, data: dict[str, Any]) -> None:
        self._log_bytes += self._log.append(kind, self._attempt, data)
        if self._listener is not None:
            self._listener(kind, self._attempt, data)


def _characters(said: Delta) -> int:
    if len(said) == 1 and "content" in said:  # Almost every delta.
        return len(said["content"])
    arguments = ((call.get("function") or {}).get("arguments") for call in said.get("tool_calls", ()))
    return sum(len(text) for text in (*said.values(), *arguments) if isinstance(text, str))
