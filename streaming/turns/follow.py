"""One reader of one turn: the events of its log, what happens while none come, and its end, wherever that stands.

Works on any web process, from any event on. While the log is away, the reader looks at the turn's row; when the log is
gone or broken, the stored turn says what is missing (docs/architecture.md, Chat).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError

from project.runtime.database_threads import in_database, in_waiting_thread
from streaming.log import events
from streaming.log.answer import Answer
from streaming.log.events import Event
from streaming.log.reader import Subscription, event_reader
from streaming.models import ChatTurn
from streaming.states import TurnState
from streaming.turns import orphaned_turns
from streaming.turns.transitions import end_data, ending_of, is_lost

# How long a reader goes without an event before it looks at the row.
LOOK_S = 0.5
# A turn that had ended before its reader came: its log answers at once, is gone, or is asked once more which of them, for
# as long as a busy process may take to read what is there.
LOG_ANSWERS_S, LOG_IS_READ_S = 0.3, 10.0
QUEUED_NOTICE_S = 5.0


@dataclass(frozen=True)
class Patience:
    """After how much silence, in seconds, a reader is told `no data`; again after as much more."""

    notice_s: float = 30.0

    @classmethod
    def of(cls, turn: ChatTurn) -> Patience:
        """Half of the budget at whose end the watchdog would end the attempt, so that the reader hears of it before."""
        provider = turn.provider
        budgets = (provider.stream_idle_timeout_ms, provider.stream_first_content_timeout_ms)
        bounded = [budget for budget in budgets if budget is not None and budget > 0]
        return cls(min(bounded) / 2000) if bounded else cls()


async def follow(turn: ChatTurn, after: int = 0) -> AsyncGenerator[Event, None]:
    """The turn's events after seq `after` up to its end event. Close it (`aclosing`).

    While none come there are notices, and at least every half second a tick, so that the reader is never held up.
    """
    reading = _Reading(turn, after)
    with event_reader().subscribe(events.log_key(turn.tenant_id, turn.public_id), after) as subscription:
        while True:
            for event in await reading.take(subscription):
                yield event
                if event.is_end:
                    return


class _Reading:
    def __init__(self, turn: ChatTurn, after: int) -> None:
        self._turn = turn
        self._seen = Answer()
        # From the middle on a reader cannot tell how much text it had: only a whole log or a whole turn can serve it.
        self._knows_all = after == 0
        self._heard_at = time.monotonic()
        self._patience = Patience.of(turn)
        self._notices = 0
        self._kinds: set[str] = set()
        self._end_is_stored = turn.has_ended
        self._end_seen_at = self._heard_at

    async def take(self, subscription: Subscription) -> list[Event]:
        came = await subscription.take(self._wait_s())
        if came:
            return self._heard(came)
        if not self._end_is_stored:
            return await self._look()
        is_patient = time.monotonic() - max(self._heard_at, self._end_seen_at) < LOG_IS_READ_S
        if is_patient and await event_reader().holds_more(subscription):
            return [_TICK]
        return self._from_row()

    def _wait_s(self) -> float:
        if self._end_is_stored:
            return LOG_ANSWERS_S
        due = self._heard_at + self._patience.notice_s * (self._notices + 1)
        return max(0.01, min(LOOK_S, due - time.monotonic()))

    def _heard(self, came: list[Event]) -> list[Event]:
        self._heard_at, self._notices = time.monotonic(), 0
        for event in came:
            self._kinds.add(event.type)
            if event.type == events.DELTA:
                self._seen.add(event.data["choice"], event.data["delta"])
            elif event.type == events.FINISH:
                self._seen.finish(event.data["choice"], event.data["finish_reason"])
        return [event for event in came if event.type != events.FENCE]

    async def _look(self) -> list[Event]:
        self._turn = await latest(self._turn)
        if await self._is_over():
            # The end is committed before it is logged: the log gets a moment to say it itself.
            self._turn, self._end_is_stored = await latest(self._turn), True
            self._end_seen_at = time.monotonic()
            return [_TICK]
        return self._notice() or [_TICK]

    async def _is_over(self) -> bool:
        if self._turn.has_ended:
            return True
        if self._turn.state == TurnState.QUEUED:
            return await in_waiting_thread(orphaned_turns.end_unclaimed, self._turn)
        return is_lost(self._turn) and await in_waiting_thread(orphaned_turns.end_lost, self._turn)

    def _notice(self) -> list[Event]:
        silent_s = time.monotonic() - self._heard_at
        if self._turn.state == TurnState.QUEUED:
            kind, every_s = "queued", QUEUED_NOTICE_S
        else:
            kind, every_s = "no_data", self._patience.notice_s
        if silent_s < every_s * (self._notices + 1):
            return []
        self._notices += 1
        return [made(events.NOTICE, {"notice": kind, "seconds": round(silent_s, 1)})]

    def _from_row(self) -> list[Event]:
        """The rest of a turn that has ended, from its row: its log is gone, or was away at its end."""
        rest = self._missing() if self._knows_all else [made(events.SNAPSHOT, snapshot_of(self._turn))]
        return [*rest, Event(events.END_SEQ, events.END, 0, end_data(ending_of(self._turn)))]

    def _missing(self) -> list[Event]:
        turn, seen = self._turn, self._seen
        rest: list[tuple[str, dict[str, Any]]] = []
        if turn.sources and events.SOURCES not in self._kinds:
            rest.append((events.SOURCES, {"sources": turn.sources}))
        for choice, delta in seen.missing_from(turn.choices):
            rest.append((events.DELTA, {"choice": choice, "offset": seen.offset(choice), "delta": delta}))
        for choice in turn.choices:
            reason, index = choice["finish_reason"], choice["index"]
            if reason and not seen.finished(index):
                rest.append((events.FINISH, {"choice": index, "finish_reason": reason}))
        if turn.usage and events.USAGE not in self._kinds:
            rest.append((events.USAGE, {"usage": turn.usage}))
        return [made(kind, data) for kind, data in rest]


def made(kind: str, data: dict[str, Any]) -> Event:
    """An event of a reader's own: it has no place in the log."""
    return Event(0, kind, 0, data)


_TICK = made(events.TICK, {})


def snapshot_of(turn: ChatTurn) -> dict[str, Any]:
    """A whole stored turn, for a reader whose log is gone."""
    return {"choices": turn.choices, "sources": turn.sources, "usage": turn.usage}


# Readers that look at their rows at about the same time share one statement.
_GATHER_S = 0.01
_asked: dict[asyncio.AbstractEventLoop, dict[int, asyncio.Future[ChatTurn]]] = {}


async def latest(turn: ChatTurn) -> ChatTurn:
    """The turn's row as it is now."""
    loop = asyncio.get_running_loop()
    waiting = _asked.get(loop)
    if waiting is None:
        waiting = _asked[loop] = {}
        loop.call_later(_GATHER_S, lambda: _keep(loop.create_task(_fetch(loop))))
    future = waiting.get(turn.pk)
    if future is None:
        future = waiting[turn.pk] = loop.create_future()
    try:
        return await asyncio.shield(future)
    except DatabaseError:
        # What was known stands: the next look tries again.
        return turn


_fetching: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    _fetching.add(task)
    task.add_done_callback(_fetching.discard)


async def _fetch(loop: asyncio.AbstractEventLoop) -> None:
    waiting = _asked.pop(loop)
    try:
        rows = await in_database(_rows, list(waiting))
    except Exception as error:  # Every waiting reader gets it, whatever it is.
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
        return
    for pk, future in waiting.items():
        if not future.done():
            future.set_result(rows[pk])


def _rows(keys: list[int]) -> dict[int, ChatTurn]:
    return {turn.pk: turn for turn in ChatTurn.objects.select_related("provider").defer("request").filter(pk__in=keys)}
