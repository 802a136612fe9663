"""One reader of one turn: the events of its log, notices while none come, and its end, from the log or the row.

It works on any web process, from any event on. While the log is away the reader polls the turn's row; if the log is gone
or broken, the rest is read from the stored turn (docs/architecture.md, Chat).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from django.db import DatabaseError, Error
from django.db.models import BooleanField, ExpressionWrapper

from project.runtime.database_threads import in_database, in_waiting_thread
from project.runtime.event_loop import kept_task
from streaming.log import events
from streaming.log.answer import Answer
from streaming.log.events import Event
from streaming.log.reader import Subscription, event_reader
from streaming.models import ChatTurn
from streaming.states import TurnState
from streaming.turns import orphaned_turns
from streaming.turns.transitions import ORPHANED, end_data, ending_of

logger = logging.getLogger(__name__)

# After so long without an event the reader polls the row.
POLL_S = 0.5
# The log of a turn that has ended: polled this often for unread events, for as long as a busy process may need to read them.
LOG_POLL_S, LOG_TIMEOUT_S = 0.3, 10.0
# A turn whose end was read has a row that says so, as soon as the database answers.
END_READ_S = 120.0
QUEUED_NOTICE_S = 5.0
UNBOUNDED_NOTICE_S = 30.0


def no_data_after_s(turn: ChatTurn) -> float:
    """Seconds of silence between `no data` notices: half the budget of the watchdog, so that a notice comes before its end."""
    provider = turn.provider
    budgets = (provider.stream_idle_timeout_ms, provider.stream_first_content_timeout_ms)
    bounded = [budget for budget in budgets if budget is not None and budget > 0]
    return min(bounded) / 2000 if bounded else UNBOUNDED_NOTICE_S


async def follow(turn: ChatTurn, after: int = 0) -> AsyncGenerator[Event, None]:
    """The turn's events after seq `after` up to its end event. Close it (`aclosing`).

    While none come there are notices, and a tick at least every half second, so that the caller regains control.
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
        self._fields: dict[str, Any] = {}
        # A reader from the middle does not know how much text it has had: it needs the whole log, or a snapshot of the turn.
        self._knows_all = after == 0
        self._heard_at = time.monotonic()
        self._no_data_after_s = no_data_after_s(turn)
        self._notices = 0
        self._kinds: set[str] = set()
        self._seq = after
        # Entries are missing: what the log still brings is not shown, and the row answers once the turn has ended.
        self._is_broken = False
        self._end_is_stored = turn.has_ended
        self._end_seen_at = self._heard_at

    async def take(self, subscription: Subscription) -> list[Event]:
        came = await subscription.take(self._wait_s())
        if came and not self._is_broken:
            return self._note(came)
        if not self._end_is_stored:
            return await self._poll()
        if self._is_broken:
            return self._from_row()
        may_read_more = time.monotonic() - max(self._heard_at, self._end_seen_at) < LOG_TIMEOUT_S
        if may_read_more and await event_reader().has_unread(subscription):
            return [_TICK]
        return self._from_row()

    def _wait_s(self) -> float:
        if self._end_is_stored:
            return LOG_POLL_S
        due = self._heard_at + self._no_data_after_s * (self._notices + 1)
        return max(0.01, min(POLL_S, due - time.monotonic()))

    def _note(self, came: list[Event]) -> list[Event]:
        self._heard_at, self._notices = time.monotonic(), 0
        shown: list[Event] = []
        for event in came:
            if self._misses_entries_before(event):
                self._is_broken = True
                break
            shown.append(event)
            self._kinds.add(event.type)
            if event.type == events.DELTA:
                self._seen.add(event.data["choice"], event.data["delta"], event.data.get("fields"))
                self._fields |= event.data.get("chunk_fields", {})
            elif event.type == events.FINISH:
                self._seen.finish(event.data["choice"], event.data["finish_reason"], event.data.get("fields"))
            elif event.type == events.FIELDS:
                self._fields |= event.data["fields"]
        return [event for event in shown if event.type != events.FENCE] or [_TICK]

    def _misses_entries_before(self, event: Event) -> bool:
        """Whether the log has lost entries (evicted, flushed, or a failover), so that its events are no whole answer."""
        if event.is_end:
            return int(event.data.pop(events.ENTRIES, 0)) > self._seq
        if event.seq >= events.FENCE_SEQ:
            return False
        is_gap, self._seq = event.seq != self._seq + 1, event.seq
        return is_gap

    async def _poll(self) -> list[Event]:
        try:
            self._turn = await latest(self._turn)
            if await self._is_over():
                # The end is committed before it is logged: the log gets a moment to deliver it.
                self._turn, self._end_is_stored = await stored_end(self._turn), True
                self._end_seen_at = time.monotonic()
                return [_TICK]
        except Error as error:
            # The log goes on without the database.
            logger.warning("turn=%s: its row cannot be read: %s", self._turn.public_id, type(error).__name__)
        return self._notice() or [_TICK]

    async def _is_over(self) -> bool:
        if self._turn.has_ended:
            return True
        if self._turn.state == TurnState.QUEUED:
            return await in_waiting_thread(orphaned_turns.end_unclaimed, self._turn)
        is_orphaned = getattr(self._turn, "is_orphaned", False)
        return is_orphaned and await in_waiting_thread(orphaned_turns.end_orphaned, self._turn)

    def _notice(self) -> list[Event]:
        silent_s = time.monotonic() - self._heard_at
        if self._turn.state == TurnState.QUEUED:
            kind, every_s = "queued", QUEUED_NOTICE_S
        else:
            kind, every_s = "no_data", self._no_data_after_s
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
        for choice, delta, fields in seen.missing_from(turn.choices):
            data = {"choice": choice, "offset": seen.offset(choice), "delta": delta}
            rest.append((events.DELTA, data | ({"fields": fields} if fields else {})))
        if fields := {name: value for name, value in turn.reply_fields.items() if self._fields.get(name) != value}:
            rest.append((events.FIELDS, {"fields": fields}))
        for choice in turn.choices:
            reason, index = choice["finish_reason"], choice["index"]
            if reason and not seen.finished(index):
                rest.append((events.FINISH, {"choice": index, "finish_reason": reason}))
        if turn.usage and events.USAGE not in self._kinds:
            rest.append((events.USAGE, {"usage": turn.usage}))
        return [made(kind, data) for kind, data in rest]


def made(kind: str, data: dict[str, Any]) -> Event:
    """An event that a reader makes itself: it has no seq."""
    return Event(0, kind, 0, data)


_TICK = made(events.TICK, {})


def snapshot_of(turn: ChatTurn) -> dict[str, Any]:
    """A whole stored turn, for a reader whose log is gone."""
    return {"choices": turn.choices, "sources": turn.sources, "usage": turn.usage, "fields": turn.reply_fields}


# Readers that poll their rows within this time share one statement (decision 11).
_SHARE_S = 0.01
# Of each loop: the keys of the poll that is being gathered, and the task that will have their rows.
_polls: dict[asyncio.AbstractEventLoop, tuple[set[int], asyncio.Task[dict[int, ChatTurn]]]] = {}


async def latest(turn: ChatTurn) -> ChatTurn:
    """The turn's row as it is now; as it was where the database is away."""
    loop = asyncio.get_running_loop()
    if loop not in _polls:
        keys: set[int] = set()
        _polls[loop] = keys, kept_task(_poll_rows(keys), name="poll-turns")
    keys, rows = _polls[loop]
    keys.add(turn.pk)
    try:
        return (await asyncio.shield(rows))[turn.pk]
    except Error:
        # The next poll tries again.
        return turn


async def stored_end(turn: ChatTurn) -> ChatTurn:
    """The row of a turn that has ended. Waits while the database is away; DatabaseError after END_READ_S seconds."""
    deadline = time.monotonic() + END_READ_S
    while not (turn := await latest(turn)).has_ended:
        if time.monotonic() > deadline:
            raise DatabaseError("the end of the turn cannot be read")
        await asyncio.sleep(POLL_S)
    return turn


async def _poll_rows(keys: set[int]) -> dict[int, ChatTurn]:
    await asyncio.sleep(_SHARE_S)
    del _polls[asyncio.get_running_loop()]
    return await in_database(_rows, list(keys))


def _rows(keys: list[int]) -> dict[int, ChatTurn]:
    turns = ChatTurn.objects.select_related("provider").defer("request").filter(pk__in=keys)
    return {turn.pk: turn for turn in turns.annotate(is_orphaned=ExpressionWrapper(ORPHANED, BooleanField()))}
