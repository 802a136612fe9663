"""Records a running turn: joins close deltas, logs them, keeps the answer, and bounds its size.

It runs on the loop and never waits: the provider is read as fast as it sends (docs/architecture.md, Chat).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streaming.log import events
from streaming.log.answer import TEXT_FIELDS, Answer, Delta, joined, merged_logprobs
from streaming.log.writer import TurnLog
from streaming.upstream.chunks import ChatDelta, text_of

JOIN_S = 0.020
# Also bounded: log probabilities, and whatever else a provider sends beside the text.
LOG_BYTES_PER_CHARACTER = 16
LOG_BYTES_LEAST = 1_000_000

_NEVER = float("-inf")
_READ = TEXT_FIELDS | {"role", "tool_calls"}

Listener = Callable[[str, int, dict[str, Any]], None]


@dataclass
class _Pending:
    delta: Delta
    logprobs: Any


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
        self._logged_at = _NEVER
        self._timer: asyncio.Handle | None = None

    def event(self, kind: str, attempt: int, data: dict[str, Any]) -> None:
        """Logs an event, after the deltas before it."""
        self.flush()
        self._attempt = attempt
        self._append(kind, data)

    def delta(self, delta: ChatDelta) -> None:
        """Takes one delta. The first is logged at once, later ones at most every 20 ms, joined."""
        said, logprobs = _said(delta)
        pending = self._pending.get(delta.index)
        if pending is not None and (both := joined(pending.delta, said)) is not None:
            pending.delta, pending.logprobs = both, merged_logprobs(pending.logprobs, logprobs)
        else:
            if pending is not None:
                self._emit(delta.index)
            self._pending[delta.index] = _Pending(said, logprobs)
        self._taken += len(delta.text) if delta.is_plain else _characters(said)
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

    def finish(self, choice: int, reason: str) -> None:
        self.event(events.FINISH, self._attempt, {"choice": choice, "finish_reason": reason})
        self.answer.finish(choice, reason)

    def _emit(self, choice: int) -> None:
        pending = self._pending.pop(choice)
        if self.is_full:
            return
        delta = self._fitting(pending.delta)
        data: dict[str, Any] = {"choice": choice, "offset": self.answer.offset(choice), "delta": delta}
        if pending.logprobs:
            data["logprobs"] = pending.logprobs
        self.answer.add(choice, delta, pending.logprobs)
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
    arguments = ((call.get("function") or {}).get("arguments") for call in said.get("tool_calls", ()))
    return sum(len(text) for text in (*said.values(), *arguments) if isinstance(text, str))


def _said(delta: ChatDelta) -> tuple[Delta, Any]:
    """The provider's delta in its own fields, without the role and without empty fields."""
    if delta.is_plain:
        return {"content": delta.text}, None
    raw = delta.choice.get("delta") or {}
    said = {name: value for name, value in raw.items() if name not in _READ and value not in (None, "", [])}
    said |= {name: text for name in TEXT_FIELDS & raw.keys() if (text := text_of(raw[name]))}
    if delta.tool_calls:
        said["tool_calls"] = delta.tool_calls
    return said, merged_logprobs(delta.choice.get("logprobs"), None)
