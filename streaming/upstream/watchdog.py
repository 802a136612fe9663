"""The watchdog: the guard over a chat stream's silence (docs/architecture.md, Chat).

`streaming.upstream.stream_clock` decides when a budget runs out; `StreamGuard` enforces it with one asyncio timer per stream.

Pure asyncio: no Django, no Celery, no SDK.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any, TypeVar

from streaming.upstream.budgets import ChatBudgets, validated_budget
from streaming.upstream.errors import (
    FinishGraceElapsedError,
    StreamCancelledError,
    StreamInactivityTimeoutError,
    StreamLifetimeExceededError,
    StreamRequestTimeoutError,
)
from streaming.upstream.stream_clock import NEVER, StreamClock

__all__ = [
    "FinishGraceElapsedError",
    "StreamCancelledError",
    "StreamClock",
    "StreamGuard",
    "StreamInactivityTimeoutError",
    "StreamLifetimeExceededError",
    "StreamRequestTimeoutError",
    "close_within",
    "with_stream_inactivity_timeout",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# After a loop was blocked past a deadline, the timer is due and data is unread in the same iteration. A second timer lets
# the reading task run before the stream counts as silent.
CONFIRMATION_S = 0.020
CLEANUP_S = 1.0


class StreamGuard:
    """Enforces a clock's deadlines on the waits of one stream.

    At a deadline the request is aborted, so that the socket is freed, and the wait ends with the clock's error; or with
    StreamCancelledError, if `is_cancelled()` says that the user had cancelled by then. One timer per stream, re-armed
    only when it comes due: a chunk that arrives in time costs no task, no timer and no context.
    """

    def __init__(
        self,
        clock: StreamClock,
        abort_request: Callable[[], None],
        is_cancelled: Callable[[], bool],
        *,
        cleanup_s: float = CLEANUP_S,
    ) -> None:
        self._clock = clock
        self._abort_request = abort_request
        self._is_cancelled = is_cancelled
        self._cleanup_s = cleanup_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._due = NEVER
        self._warned_at: float | None = None
        self._error: Exception | None = None
        self._cancels = 0
        self._cancels_before = 0

    async def wait(self, upstream: Awaitable[T]) -> T:
        """What `upstream` gives; or the error of the budget that ran out first. The task's own cancellation wins."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        self._begin(loop)
        try:
            return await upstream
        finally:
            task, self._task = self._task, None
            self._clock.end_wait(loop.time())
            if self._cancels and task is not None:
                self._settle(task)

    async def watch(self, source: AsyncIterable[T], note: Callable[[T], None]) -> AsyncGenerator[T, None]:
        """The source's items, each noted on arrival, under the clock. Close it (`aclosing`) unless it is exhausted.

        Every exit closes the source within a bound, never hiding the first error; every exit but the source's own end
        aborts the request as well.
        """
        iterator = aiter(source)
        exhausted = False
        try:
            while True:
                try:
                    item = await self.wait(anext(iterator))
                except StopAsyncIteration:
                    exhausted = True
                    return
                note(item)
                yield item
        finally:
            self.stop()
            if not exhausted:
                self._abort()
            await close_within(getattr(iterator, "aclose", None), self._cleanup_s)

    def stop(self) -> None:
        """No more deadlines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._task = task = asyncio.current_task(loop)
        self._cancels_before = task.cancelling() if task is not None else 0
        self._due = due = self._clock.begin_wait(now)
        if due > now:
            self._warned_at = None
        else:
            if self._warned_at is None:
                self._warned_at = now
            due = max(now, self._warned_at + CONFIRMATION_S)
        if due != NEVER and (self._timer is None or self._timer.when() > due):
            self._arm(loop, due)

    def _arm(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        self.stop()
        self._timer = loop.call_at(at, self._timer_due, loop)

    def _timer_due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._task is None:  # Between two waits, on the consumer's time: the next wait arms it again.
            return
        now = loop.time()
        if self._cancels:  # The cancelled wait is stuck in its own clean-up.
            self._cancel_wait(loop, self._task, now)
        elif now < self._due:
            self._arm(loop, self._due)
        elif self._warned_at is None:
            self._warned_at = now
            self._arm(loop, now + CONFIRMATION_S)
        elif now < self._warned_at + CONFIRMATION_S:
            self._arm(loop, self._warned_at + CONFIRMATION_S)
        else:
            self._error = StreamCancelledError() if self._user_cancelled() else self._clock.expiry_error(now)
            self._abort()
            self._cancel_wait(loop, self._task, now)

    def _cancel_wait(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], now: float) -> None:
        self._cancels += 1
        task.cancel()
        self._arm(loop, now + self._cleanup_s)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        """Takes our own cancellations back. Whatever the wait ended with, the expiry or a real cancel stands."""
        cancels, self._cancels = self._cancels, 0
        for _ in range(cancels):
            task.uncancel()
        self.stop()
        if task.cancelling() > self._cancels_before:
            raise asyncio.CancelledError
        assert self._error is not None  # noqa: S101 - set wherever _cancels is
        raise self._error from None

    def _user_cancelled(self) -> bool:
        return self._contained(self._is_cancelled) or False

    def _abort(self) -> None:
        self._contained(self._abort_request)

    def _contained(self, callback: Callable[[], T]) -> T | None:
        """The callback's result. An error of it must neither leave the stream unguarded nor replace the reason of an abort."""
        try:
            return callback()
        except Exception as error:
            # Whatever a caller's code raises, the watchdog goes on.
            logger.error("%s raised %s", getattr(callback, "__name__", "a callback"), type(error).__name__)
            return None


def with_stream_inactivity_timeout(
    source: AsyncIterable[T],
    idle_ms: int,
    abort_request: Callable[[], None],
    is_cancelled: Callable[[], bool],
) -> AsyncGenerator[T, None]:
    """The source's chunks; StreamInactivityTimeoutError (code ETIMEDOUT) once none has come for `idle_ms`.

    For a stream whose only budget is its silence; a chat attempt, which has more, drives `StreamGuard` itself. `<= 0`
    disables: the chunks pass through. Every chunk restarts the timer. Close it with `contextlib.aclosing`. Raises
    InvalidBudgetError for an `idle_ms` that is no integer.
    """
    idle_ms = validated_budget("stream_idle_timeout_ms", idle_ms)
    clock = StreamClock(ChatBudgets(stream_idle_timeout_ms=idle_ms, stream_lifetime_ms=0))
    clock.headers_arrived()
    clock.content_arrived()

    def note(chunk: T) -> None:
        clock.bytes_arrived(len(chunk) if isinstance(chunk, bytes) else 0)
        clock.chunk_arrived()

    return StreamGuard(clock, abort_request, is_cancelled).watch(source, note)


async def close_within(close: Callable[[], Awaitable[Any]] | None, bound_s: float) -> None:
    """Runs a clean-up for at most `bound_s` seconds. Its errors are logged; if it hangs, it is cancelled and abandoned."""
    if close is None:
        return
    task = asyncio.ensure_future(_logged(close))
    expiry = asyncio.get_running_loop().call_later(bound_s, task.cancel)
    task.add_done_callback(lambda _: expiry.cancel())
    await asyncio.wait({task}, timeout=bound_s + CONFIRMATION_S)


async def _logged(close: Callable[[], Awaitable[Any]]) -> None:
    try:
        await close()
    except Exception as error:  # A clean-up's failure must not hide the reason for it.
        logger.debug("closing a stream raised %s", type(error).__name__)
