"""The watchdog: silence ends a stream within its budget, and nothing else does."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from streaming.upstream.budgets import ChatBudgets, InvalidBudgetError
from streaming.upstream.errors import StreamCancelledError, StreamInactivityTimeoutError, StreamLifetimeExceededError
from streaming.upstream.retry import classify_retry_error
from streaming.upstream.stream_clock import StreamClock
from streaming.upstream.watchdog import StreamGuard, close_within, with_stream_inactivity_timeout
from tests.support.strict_loop import run

OFF = ChatBudgets(**dict.fromkeys(ChatBudgets.__dataclass_fields__, 0))


class Source:
    """A stream that gives its chunks, each after its delay, and then hangs, ends, or fails."""

    def __init__(self, *chunks, delay=0.0, then="hang", on_close=None):
        self.chunks, self.delay, self.then, self.on_close = list(chunks), delay, then, on_close
        self.closed = False
        self.pending = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.pending += 1
        try:
            if self.chunks:
                await asyncio.sleep(self.delay)
                return self.chunks.pop(0)
            if self.then == "hang":
                await asyncio.Event().wait()
            if isinstance(self.then, Exception):
                raise self.then
            raise StopAsyncIteration
        finally:
            self.pending -= 1

    async def aclose(self):
        self.closed = True
        if self.on_close is not None:
            await self.on_close()


class Request:
    """The request that the watchdog may abort."""

    def __init__(self, cancelled=False):
        self.aborts = 0
        self.cancelled = cancelled

    def abort(self):
        self.aborts += 1

    def is_cancelled(self):
        return self.cancelled


async def read(source, idle_ms, request, seen, pause=0.0):
    guarded = with_stream_inactivity_timeout(source, idle_ms, request.abort, request.is_cancelled)
    async with contextlib.aclosing(guarded) as chunks:
        async for chunk in chunks:
            seen.append(chunk)
            if pause:
                await asyncio.sleep(pause)


def read_until_error(source, idle_ms, error_type, request=None):
    """(the error, the chunks before it, the request)"""
    request, seen = request or Request(), []
    with pytest.raises(error_type) as caught:
        run(read(source, idle_ms, request, seen))
    assert source.closed
    assert source.pending == 0
    return caught.value, seen, request


# --- what must end a stream, and what must not -----------------------------------------------------------------------
def test_a_stream_without_any_chunk_times_out():
    error, seen, request = read_until_error(Source(), 60, StreamInactivityTimeoutError)
    assert (error.code, error.idle_ms, error.chunks_received, seen) == ("ETIMEDOUT", 60, 0, [])
    assert 60 <= error.stream_lifetime_ms < 1_000
    assert request.aborts >= 1
    assert classify_retry_error(error).retryable


def test_a_stall_after_chunks_times_out_and_the_chunks_were_delivered():
    error, seen, request = read_until_error(Source(b"ab", b"c"), 60, StreamInactivityTimeoutError)
    assert (error.code, error.chunks_received, error.bytes_received, seen) == ("ETIMEDOUT", 2, 3, [b"ab", b"c"])
    assert request.aborts >= 1


def test_every_chunk_restarts_the_timer():
    request, seen = Request(), []
    run(read(Source(*range(8), delay=0.05, then="end"), 150, request, seen))
    assert seen == list(range(8))
    assert request.aborts == 0


def test_a_cancel_that_has_happened_by_then_wins_over_the_timeout():
    error, _, request = read_until_error(Source(1), 40, StreamCancelledError, Request(cancelled=True))
    assert error.code != "ETIMEDOUT"
    assert request.aborts >= 1
    assert not classify_retry_error(error).retryable


@pytest.mark.parametrize("idle_ms", [0, -1])
def test_a_disabled_watchdog_lets_a_hanging_stream_hang(idle_ms):
    async def main():
        request, seen = Request(), []
        task = asyncio.create_task(read(Source(1, 2), idle_ms, request, seen))
        done, _ = await asyncio.wait({task}, timeout=0.2)
        assert (done, seen) == (set(), [1, 2])
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    run(main())


def test_the_configured_value_is_the_one_that_counts():
    started = time.monotonic()
    error, _, _ = read_until_error(Source(), 250, StreamInactivityTimeoutError)
    assert error.idle_ms == 250
    assert 0.25 <= time.monotonic() - started < 5


def test_nonsense_as_a_budget_is_refused_by_name():
    with pytest.raises(InvalidBudgetError, match="stream_idle_timeout_ms"):
        with_stream_inactivity_timeout(Source(), 1.5, Request().abort, Request().is_cancelled)


def test_the_aborted_read_leaves_no_orphan_behind():
    """`run` fails on unretrieved exceptions, pending tasks and unclosed generators."""

    async def failing_once_aborted():
        yield 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionAbortedError("the request was aborted") from None

    async def main():
        request, seen = Request(), []
        with pytest.raises(StreamInactivityTimeoutError):
            await read(failing_once_aborted(), 40, request, seen)
        assert seen == [1]

    run(main())


def test_a_source_that_swallows_the_cancel_still_times_out():
    async def swallowing():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            yield "late"

    async def main():
        with pytest.raises(StreamInactivityTimeoutError):
            await read(swallowing(), 40, Request(), [])

    run(main())


# --- the consumer's time, and other people's cancels -----------------------------------------------------------------
def test_a_slow_consumer_is_never_charged():
    request, seen = Request(), []
    run(read(Source(1, 2, 3, then="end"), 40, request, seen, pause=0.12))
    assert (seen, request.aborts) == ([1, 2, 3], 0)


def test_the_expiry_never_hits_an_await_of_the_consumer():
    async def main():
        guarded = with_stream_inactivity_timeout(Source(1, 2), 40, Request().abort, Request().is_cancelled)
        async with contextlib.aclosing(guarded) as chunks:
            await anext(chunks)
            await asyncio.sleep(0.15)
            assert await anext(chunks) == 2
            assert asyncio.current_task().cancelling() == 0
            with pytest.raises(StreamInactivityTimeoutError):
                await anext(chunks)
            assert asyncio.current_task().cancelling() == 0
            await asyncio.sleep(0.05)

    run(main())


def test_an_expiry_that_outlives_its_wait_hits_the_consumer(monkeypatch):
    """The twin: the wait never tells the timer that it is over, as a timeout held across a `yield` does not."""

    async def wait(self, upstream):
        self._begin(asyncio.get_running_loop())
        self._loop = asyncio.get_running_loop()
        return await upstream

    monkeypatch.setattr(StreamGuard, "wait", wait)

    async def main():
        guarded = with_stream_inactivity_timeout(Source(1, 2), 40, lambda: None, lambda: False)
        async with contextlib.aclosing(guarded) as chunks:
            await anext(chunks)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0.5)
            asyncio.current_task().uncancel()

    run(main())


def test_a_cancelled_task_stays_cancelled_even_at_the_moment_of_the_expiry():
    """A real cancel delivered from inside `abort_request`, in the very callback that expires the stream."""

    async def main():
        task = None

        def abort():
            task.cancel()

        async def reader():
            async with contextlib.aclosing(
                with_stream_inactivity_timeout(Source(), 30, abort, lambda: False)
            ) as chunks:
                await anext(chunks)

        for _ in range(20):
            task = asyncio.create_task(reader())
            await asyncio.wait({task})
            assert task.cancelled()

    run(main())


def test_a_cancel_in_the_tick_of_a_chunk_is_not_swallowed():
    async def main():
        lost = 0
        for _ in range(200):
            chunk = asyncio.get_running_loop().create_future()

            async def one(chunk=chunk):
                yield await chunk

            async def reader(source):
                await read(source, 1_000, Request(), [])
                await asyncio.sleep(0.2)

            task = asyncio.create_task(reader(one()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            chunk.set_result(1)
            task.cancel()
            await asyncio.wait({task})
            lost += not task.cancelled()
        assert lost == 0

    run(main())


# --- a blocked loop --------------------------------------------------------------------------------------------------
async def _blocked_loop_round(guarded_with):
    """Blocks the loop for longer than the budget while a chunk waits in the socket. The chunk, or the error."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    async def packets():
        while packet := await reader.read(100):
            yield packet

    try:
        async with contextlib.aclosing(guarded_with(packets())) as chunks:
            theirs.send(b"first")
            assert await anext(chunks) == b"first"
            pending = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_soon(_block, theirs)
            return await pending
    finally:
        theirs.close()
        writer.close()
        await writer.wait_closed()


def _block(theirs):
    theirs.send(b"second")
    time.sleep(0.2)  # This is the fault itself: something blocks the loop.


def _guarded(source):
    return with_stream_inactivity_timeout(source, 100, lambda: None, lambda: False)


def test_a_blocked_loop_is_not_mistaken_for_a_silent_stream():
    async def main():
        return [await _blocked_loop_round(_guarded) for _ in range(6)]

    assert run(main()) == [b"second"] * 6


def test_without_the_second_stage_a_blocked_loop_is_a_false_timeout(monkeypatch):
    monkeypatch.setattr("streaming.upstream.watchdog.StreamGuard._timer_due", _one_stage)

    async def main():
        with pytest.raises(StreamInactivityTimeoutError):
            await _blocked_loop_round(_guarded)

    run(main())


def _one_stage(self, loop):
    self._timer = None
    if self._task is not None:
        self._error = self._clock.expiry_error(loop.time())
        self._cancel_wait(loop, self._task, loop.time())


# --- clean-up --------------------------------------------------------------------------------------------------------
def test_clean_up_is_bounded_and_the_timeout_stands():
    async def main():
        async def never():
            await asyncio.Event().wait()

        source, clock = Source(on_close=never), StreamClock(_only(stream_idle_timeout_ms=40))
        clock.headers_arrived()
        clock.content_arrived()
        guard = StreamGuard(clock, lambda: None, lambda: False, cleanup_s=0.1)
        started = time.monotonic()
        with pytest.raises(StreamInactivityTimeoutError):
            await anext(guard.watch(source, lambda _: None))
        assert source.closed
        assert time.monotonic() - started < 5

    run(main())


def test_a_read_that_hangs_in_its_own_clean_up_is_bounded():
    async def main():
        async def stuck():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.Event().wait()
            yield

        clock = StreamClock(_only(stream_first_content_timeout_ms=40))
        clock.headers_arrived()
        guard = StreamGuard(clock, lambda: None, lambda: False, cleanup_s=0.1)
        with pytest.raises(StreamInactivityTimeoutError):
            await anext(guard.watch(stuck(), lambda _: None))
        assert asyncio.current_task().cancelling() == 0

    run(main())


@pytest.mark.parametrize("first", [StreamInactivityTimeoutError, KeyError])
def test_a_failing_clean_up_never_hides_the_first_error(first):
    async def main():
        async def failing():
            raise OSError("close failed")

        def abort():
            raise OSError("abort failed")

        source = Source(on_close=failing, then="hang" if first is StreamInactivityTimeoutError else KeyError("first"))
        with pytest.raises(first):
            await anext(with_stream_inactivity_timeout(source, 40, abort, lambda: False))
        assert source.closed

    run(main())


def test_a_cancel_flag_that_cannot_be_read_leaves_the_timeout_standing():
    async def main():
        def unreadable():
            raise OSError("the flag is gone")

        with pytest.raises(StreamInactivityTimeoutError):
            await anext(with_stream_inactivity_timeout(Source(), 40, lambda: None, unreadable))

    run(main())


def test_a_break_closes_the_source_and_aborts_the_request():
    async def main():
        source, request = Source(1, 2, 3), Request()
        guarded = with_stream_inactivity_timeout(source, 1_000, request.abort, request.is_cancelled)
        async with contextlib.aclosing(guarded) as chunks:
            async for _ in chunks:
                break
        assert (source.closed, request.aborts, source.pending) == (True, 1, 0)

    run(main())


def test_the_sources_own_end_closes_but_does_not_abort():
    source, request, seen = Source(1, then="end"), Request(), []
    run(read(source, 1_000, request, seen))
    assert (source.closed, request.aborts, seen) == (True, 0, [1])


def test_closing_within_a_bound_waits_no_longer():
    async def main():
        started = time.monotonic()
        await close_within(asyncio.Event().wait, 0.05)
        assert time.monotonic() - started < 5
        await close_within(None, 0.05)

    run(main())


def _only(**budgets):
    return ChatBudgets(**(OFF.__dict__ | budgets))


# --- endings that bytes cannot put off -------------------------------------------------------------------------------
def test_a_dripping_stream_ends_with_its_lifetime():
    async def main():
        clock = StreamClock(_only(stream_lifetime_ms=150, stream_idle_timeout_ms=1_000))
        clock.headers_arrived()
        clock.content_arrived()
        guard = StreamGuard(clock, lambda: None, lambda: False)
        source = Source(*range(10_000), delay=0.005)
        started = time.monotonic()
        with pytest.raises(StreamLifetimeExceededError):
            async for _ in guard.watch(source, lambda _: clock.chunk_arrived()):
                pass
        assert time.monotonic() - started < 5

    run(main())


def test_no_thread_and_no_task_stands_behind_a_chunk():
    async def main():
        tasks, threads = len(asyncio.all_tasks()), threading.active_count()
        guarded = with_stream_inactivity_timeout(Source(*range(50), then="end"), 500, lambda: None, lambda: False)
        async with contextlib.aclosing(guarded) as chunks:
            async for _ in chunks:
                assert (len(asyncio.all_tasks()), threading.active_count()) == (tasks, threads)

    run(main())
