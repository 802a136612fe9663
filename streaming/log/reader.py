"""Reads the events of all turns that this process follows: one connection and one blocking read for all of them.

A reader that is slow is left out of the read until it has caught up: the log keeps what it has not taken
(docs/architecture.md, Chat).
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

from project.runtime.event_loop import PerLoop
from streaming.log import events
from streaming.log.batching import Gathering
from streaming.log.events import Event
from streaming.log.valkey import UNREACHABLE, Wire, connect_async

logger = logging.getLogger(__name__)

# Entries of one turn in one read, and how many a reader may have waiting: no turn delays another's first event.
SHARE = 64
BACKLOG = 128
BLOCK_MS = 1_000
PAUSE_S = 0.2
# Never longer than a delta may wait to be joined.
GATHERING = Gathering(s_per_turn=0.000_1, s_most=0.020)
BELL_TTL_S = 60


class Subscription:
    """One reader of one turn's log, from after `seq` on. Use it as a context manager."""

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
        """The events that have come, at least one unless `within_s` seconds pass without any."""
        if not self._waiting:
            await self._news(within_s)
        was_full = self.is_full
        taken = list(self._waiting)
        self._waiting.clear()
        if was_full:
            self._reader.look_again()
        return taken

    async def _news(self, within_s: float) -> None:
        # A bare future: for thousands of events a second, an event and a timeout cost twice as much.
        loop = asyncio.get_running_loop()
        self._came = loop.create_future()
        patience = loop.call_later(within_s, self._wake)
        try:
            await self._came
        finally:
            patience.cancel()
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
        self._wire: Wire | None = None
        self._bell: redis.asyncio.Redis | None = None
        # A stream of this reader's own among those it reads: an entry in it ends a read that waits for others.
        self._bell_key = f"sluicegate:bell:{secrets.token_hex(8)}"
        self._bell_after = "0-0"
        self._bell_expires_at = 0.0
        self._is_blocked = self._is_away = False
        self._ringing: set[asyncio.Task[None]] = set()

    def subscribe(self, key: str, after: int = 0) -> Subscription:
        return Subscription(self, key, after)

    def add(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="event-reader")
        self.look_again()

    def remove(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    async def holds_more(self, subscription: Subscription) -> bool:
        """Whether the log has something that no read has brought the subscription yet; False while it is away."""
        if self._bell is None:
            return not self._is_away
        with contextlib.suppress(*UNREACHABLE):
            return bool(await self._bell.xrange(subscription.key, f"({subscription.after}-0", count=1))
        return False

    def look_again(self) -> None:
        """Makes the read start anew with the subscriptions as they are now."""
        self._changed.set()
        if self._is_blocked:
            self._is_blocked = False
            task = asyncio.create_task(self._ring())
            self._ringing.add(task)
            task.add_done_callback(self._ringing.discard)

    async def _run(self) -> None:
        task = asyncio.current_task()
        try:
            # The client swallows a cancellation that comes as one of its steps is done.
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
        if self._wire is None:
            self._wire, self._bell = await Wire.open(), await connect_async()
            self._is_away = False
        by_key: dict[str, list[Subscription]] = {}
        for subscription in open_ones:
            by_key.setdefault(subscription.key, []).append(subscription)
        self._deliver(await self._entries(by_key), by_key)
        await GATHERING.pause(len(by_key))

    async def _entries(self, by_key: dict[str, list[Subscription]]) -> Any:
        assert self._wire is not None  # noqa: S101 - connected by the caller
        after = [f"{min(subscription.after for subscription in each)}-0" for each in by_key.values()]
        self._changed.clear()
        self._is_blocked = True
        try:
            streams = (self._bell_key, *by_key, self._bell_after, *after)
            return await self._wire.ask("XREAD", "COUNT", SHARE, "BLOCK", BLOCK_MS, "STREAMS", *streams)
        finally:
            self._is_blocked = False

    def _deliver(self, found: Any, by_key: dict[str, list[Subscription]]) -> None:
        for key, entries in found or ():
            name = key.decode()
            if name == self._bell_key:
                self._bell_after = entries[-1][0].decode()
                continue
            for entry_id, (_, payload) in entries:
                self._deliver_one(by_key[name], events.decode(entry_id, payload))

    def _deliver_one(self, readers: list[Subscription], event: Event) -> None:
        for subscription in readers:
            subscription.put(event)

    async def _ring(self) -> None:
        """A ring that fails costs no more than one read's patience."""
        if self._bell is not None:
            with contextlib.suppress(*UNREACHABLE):
                await self._bell.xadd(self._bell_key, {"ring": 1}, maxlen=1)
                if time.monotonic() >= self._bell_expires_at - BELL_TTL_S / 2:
                    self._bell_expires_at = time.monotonic() + BELL_TTL_S
                    await self._bell.expire(self._bell_key, BELL_TTL_S)

    async def _disconnect(self) -> None:
        wire, bell, self._wire, self._bell = self._wire, self._bell, None, None
        with contextlib.suppress(*UNREACHABLE):
            if wire is not None:
                await wire.close()
        with contextlib.suppress(*UNREACHABLE):
            if bell is not None:
                await bell.aclose()


event_reader = PerLoop(EventReader)
