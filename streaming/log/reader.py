"""Reads the events of all turns that this process follows: one connection and one blocking read for all of them.

A slow subscription is left out of the read until it has caught up: the log keeps the events that it has not taken
(docs/architecture.md, Chat; decision 16).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

import redis.asyncio

from project.runtime.event_loop import PerLoop, kept_task
from streaming.log import events
from streaming.log.batching import BatchPause
from streaming.log.events import Event
from streaming.log.valkey import TIMEOUT_S, UNREACHABLE, connect_async, connect_once

logger = logging.getLogger(__name__)

# Entries of one turn in one read, and the most that may wait in a subscription: no turn delays another's first event.
SHARE = 64
BACKLOG = 128
BLOCK_MS = 1_000
PAUSE_S = 0.2
# At most the 20 ms in which deltas are joined.
BATCH_PAUSE = BatchPause(s_per_turn=0.000_1, s_most=0.020)
WAKE_KEY_TTL_S = 60


class Subscription:
    """One reader of one turn's log, after seq `after`. Use it as a context manager."""

    def __init__(self, reader: EventReader, key: str, after: int) -> None:
        self.key = key
        self.after = after
        self._reader = reader
        self._waiting: deque[Event] = deque()
        self._came: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._reader.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.remove(self)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= BACKLOG

    async def take(self, within_s: float) -> list[Event]:
        """Waits for events, for at most `within_s` seconds, and returns all that have come."""
        if not self._waiting:
            await self._wait(within_s)
        was_full = self.is_full
        taken = list(self._waiting)
        self._waiting.clear()
        if was_full:
            self._reader.restart_read()
        return taken

    async def _wait(self, within_s: float) -> None:
        # A bare future: an event and a timeout cost twice as much, thousands of times a second.
        loop = asyncio.get_running_loop()
        self._came = loop.create_future()
        timer = loop.call_later(within_s, self._wake)
        try:
            await self._came
        finally:
            timer.cancel()
            self._came = None

    def put(self, event: Event) -> None:
        if event.seq > self.after:
            self.after = event.seq
            self._waiting.append(event)
            self._wake()

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)


class EventReader:
    """The reader of one loop. Its task and connections live while there are subscriptions."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: redis.asyncio.Redis | None = None
        self._waker: redis.asyncio.Redis | None = None
        # A stream of this reader's own among those that it reads: an entry in it ends a blocking read.
        self._wake_key = f"sluicegate:wake:{secrets.token_hex(8)}"
        self._wake_after = "0-0"
        self._wake_expires_at = 0.0
        self._is_blocked = self._is_away = False

    def subscribe(self, key: str, after: int = 0) -> Subscription:
        return Subscription(self, key, after)

    def add(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)
        if self._task is None or self._task.done():
            self._task = kept_task(self._run(), name="event-reader")
        self.restart_read()

    def remove(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    async def has_unread(self, subscription: Subscription) -> bool:
        """Whether the log has events that the subscription has not received; False while the log is away."""
        if self._waker is None:
            return not self._is_away
        with contextlib.suppress(*UNREACHABLE):
            return bool(await self._waker.xrange(subscription.key, f"({subscription.after}-0", count=1))
        return False

    def restart_read(self) -> None:
        """Restarts the blocking read with the subscriptions as they are now."""
        self._changed.set()
        if self._is_blocked:
            self._is_blocked = False
            kept_task(self._wake_read(), name="event-reader-wake")

    async def _run(self) -> None:
        task = asyncio.current_task()
        try:
            # The client may swallow a cancellation during a read: it is obeyed before the next one.
            while task is None or not task.cancelling():
                try:
                    await self._read()
                except UNREACHABLE as error:
                    self._is_away = True
                    logger.warning("the event log cannot be read: %s", type(error).__name__)
                    await self._disconnect()
                    await asyncio.sleep(PAUSE_S)
        finally:
            await self._disconnect()

    async def _read(self) -> None:
        """One read for all subscriptions that have room."""
        open_ones = [subscription for subscription in self._subscriptions if not subscription.is_full]
        if not open_ones:
            self._changed.clear()
            await self._changed.wait()
            return
        if self._client is None:
            self._client, self._waker = await connect_once(), await connect_async()
            self._is_away = False
        by_key: dict[str, list[Subscription]] = {}
        for subscription in open_ones:
            by_key.setdefault(subscription.key, []).append(subscription)
        self._deliver(await self._entries(by_key), by_key)
        await BATCH_PAUSE.pause(len(by_key))

    async def _entries(self, by_key: dict[str, list[Subscription]]) -> Any:
        assert self._client is not None  # noqa: S101 - connected by the caller
        after = [f"{min(subscription.after for subscription in each)}-0" for each in by_key.values()]
        self._changed.clear()
        self._is_blocked = True
        try:
            streams: Any = {self._wake_key: self._wake_after, **dict(zip(by_key, after, strict=True))}
            async with asyncio.timeout(TIMEOUT_S):
                return await self._client.xread(streams, count=SHARE, block=BLOCK_MS)
        finally:
            self._is_blocked = False

    def _deliver(self, streams: Any, by_key: dict[str, list[Subscription]]) -> None:
        for key, entries in streams or ():
            name = key.decode()
            if name == self._wake_key:
                self._wake_after = entries[-1][0].decode()
                continue
            for entry_id, fields in entries:
                event = events.decode(entry_id, fields[b"e"])
                for subscription in by_key[name]:
                    subscription.put(event)

    async def _wake_read(self) -> None:
        """Ends the blocking read. If this fails, the read ends by itself after BLOCK_MS."""
        if self._waker is not None:
            with contextlib.suppress(*UNREACHABLE):
                await self._waker.xadd(self._wake_key, {"wake": 1}, maxlen=1)
                if time.monotonic() >= self._wake_expires_at - WAKE_KEY_TTL_S / 2:
                    self._wake_expires_at = time.monotonic() + WAKE_KEY_TTL_S
                    await self._waker.expire(self._wake_key, WAKE_KEY_TTL_S)

    async def _disconnect(self) -> None:
        client, waker, self._client, self._waker = self._client, self._waker, None, None
        with contextlib.suppress(*UNREACHABLE):
            if client is not None:
                await client.aclose()
        with contextlib.suppress(*UNREACHABLE):
            if waker is not None:
                await waker.aclose()


event_reader = PerLoop(EventReader)
