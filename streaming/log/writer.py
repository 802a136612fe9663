"""Appends the events of all turns of this process: one connection, one pipeline at a time, no turn delays another.

While the server is away, events are kept and appended once it is back. Entries of a running turn that a restarted server has
lost are appended again under their ids (docs/architecture.md, Chat; decision 16).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any
from uuid import UUID

import redis.asyncio
from django.conf import settings
from redis.exceptions import ResponseError

from project.runtime.event_loop import PerLoop, kept_task
from streaming.log import events
from streaming.log.batching import BatchPause
from streaming.log.valkey import TIMEOUT_S, UNREACHABLE, connect_once

logger = logging.getLogger(__name__)

# Entries of one turn in one pipeline: a turn with a backlog does not delay the first events of others.
SHARE = 64
PAUSE_S = 0.2
# Entries that no reader waits for are written with the next ones, or after this time.
WAIT_S = 0.020
_MAY_WAIT = frozenset({events.START, events.ATTEMPT})
# Far below the 20 ms in which deltas are joined.
BATCH_PAUSE = BatchPause(s_per_turn=0.000_05, s_most=0.010)
# A running turn's log expires late, in case its worker dies; the end event sets EVENT_LOG_TTL_SECONDS.
RUNNING_TTL_S = 7 * 86_400


class TurnLog:
    """The log of one turn, written by its worker. `append` never waits; entries are kept until the turn has ended."""

    def __init__(self, writer: EventWriter, key: str) -> None:
        self.key = key
        self.entries: list[bytes] = []
        self.end: bytes | None = None
        self.written = 0
        self.is_settled = asyncio.Event()
        self._writer = writer

    def append(self, kind: str, attempt: int, data: dict[str, Any]) -> int:
        """Appends an event; call it on the writer's loop. Returns its size in bytes."""
        entry = events.encode(kind, attempt, data)
        self.entries.append(entry)
        self._writer.mark_pending(self, may_wait=kind in _MAY_WAIT)
        return len(entry)

    async def close(self, attempt: int, end: dict[str, Any], within_s: float) -> bool:
        """Appends the end event. False if not all was written in time: readers then find the end in the database."""
        self.end = events.encode(events.END, attempt, {**end, events.ENTRIES: len(self.entries)})
        self._writer.mark_pending(self)
        try:
            async with asyncio.timeout(within_s):
                await self.is_settled.wait()
        except TimeoutError:
            return False
        finally:
            self._writer.forget(self)
        return True

    def abandon(self) -> None:
        """Appends nothing more: the claim is lost."""
        self.entries.clear()
        self.is_settled.set()
        self._writer.forget(self)

    def pending(self) -> list[tuple[int, bytes]]:
        """The next entries to write, with their seq."""
        share = self.entries[self.written : self.written + SHARE]
        numbered = list(enumerate(share, start=self.written + 1))
        if self.end is not None and self.written + len(share) == len(self.entries):
            numbered.append((events.END_SEQ, self.end))
        return numbered

    def note_written(self, seq: int) -> None:
        if seq >= events.FENCE_SEQ:
            # The end is written, by us or by another process: nothing can follow.
            self.is_settled.set()
            self._writer.forget(self)
        else:
            self.written = seq


class EventWriter:
    """The writer of one loop. Its connection is made at the first event and kept."""

    def __init__(self) -> None:
        self._logs: set[TurnLog] = set()
        self._pending: set[TurnLog] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._client: redis.asyncio.Redis | None = None

    def open(self, tenant_id: int, public_id: UUID) -> TurnLog:
        """A new turn's log."""
        log = TurnLog(self, events.log_key(tenant_id, public_id))
        self._logs.add(log)
        if self._task is None or self._task.done():
            self._task = kept_task(self._run(), name="event-writer")
        return log

    def mark_pending(self, log: TurnLog, *, may_wait: bool = False) -> None:
        if log in self._logs:
            self._pending.add(log)
            if not may_wait:
                self._wake.set()
            elif self._alarm is None:
                self._alarm = asyncio.get_running_loop().call_later(WAIT_S, self._awake)

    def _awake(self) -> None:
        self._alarm = None
        self._wake.set()

    def forget(self, log: TurnLog) -> None:
        self._logs.discard(log)
        self._pending.discard(log)

    async def _run(self) -> None:
        task = asyncio.current_task()
        try:
            # The client may swallow a cancellation during a read: it is obeyed before the next write.
            while task is None or not task.cancelling():
                try:
                    await self._write_pending()
                    await BATCH_PAUSE.pause(len(self._logs))
                except UNREACHABLE as error:
                    logger.warning("the event log cannot be written, events are kept: %s", type(error).__name__)
                    await self._disconnect()
                    await asyncio.sleep(PAUSE_S)
                    self._wake.set()
        finally:
            await self._disconnect()

    async def _write_pending(self) -> None:
        # Cleared first: an entry that is appended during the write wakes the next round.
        await self._wake.wait()
        self._wake.clear()
        if not self._pending:
            return
        if self._client is None:
            await self._connect()
        logs, self._pending = self._pending, set()
        try:
            await self._write([(log, log.pending()) for log in logs])
        finally:
            if left := {log for log in logs if log in self._logs and log.pending()}:
                self._pending |= left
                self._wake.set()

    async def _write(self, batch: list[tuple[TurnLog, list[tuple[int, bytes]]]]) -> None:
        commands: list[tuple[bytes | str | int, ...]] = []
        written: list[tuple[TurnLog, int]] = []
        for log, entries in batch:
            for seq, payload in entries:
                # A log that has vanished without a disconnect (evicted, flushed) is written again from its first entry.
                existing = () if seq == 1 else ("NOMKSTREAM",)
                commands.append(("XADD", log.key, *existing, f"{seq}-0", "e", payload))
                written.append((log, seq))
                if seq in (1, events.END_SEQ):
                    ttl = RUNNING_TTL_S if seq == 1 else settings.EVENT_LOG_TTL_SECONDS
                    commands.append(("EXPIRE", log.key, ttl))
                    written.append((log, 0))
        assert self._client is not None  # noqa: S101 - connected by the caller
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        async with asyncio.timeout(TIMEOUT_S):
            replies = await pipeline.execute(raise_on_error=False)
        # None: the stream does not exist any more.
        refused = {
            log
            for (log, _), reply in zip(written, replies, strict=True)
            if reply is None or isinstance(reply, Exception)
        }
        for log, seq in written:
            if seq and log not in refused:
                log.note_written(seq)
        for log in refused:
            if await self._last_seq(log) == log.written:
                raise ResponseError("the server refuses what should follow")
            await self._resume(log)

    async def _connect(self) -> None:
        self._client = await connect_once()
        for log in list(self._logs):
            await self._resume(log)

    async def _resume(self, log: TurnLog) -> None:
        """Continues after the last entry that the server has, which may be more, or fewer, than it had confirmed."""
        log.written = 0
        if seq := await self._last_seq(log):
            log.note_written(min(seq, len(log.entries)) if seq < events.FENCE_SEQ else seq)
        self.mark_pending(log)

    async def _last_seq(self, log: TurnLog) -> int:
        assert self._client is not None  # noqa: S101 - connected by the caller
        last: Any = await self._client.xrevrange(log.key, count=1)
        return events.seq_of(last[0][0]) if last else 0

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*UNREACHABLE):
                await client.aclose()


event_writer = PerLoop(EventWriter)
