"""How a drain waits for its calls: in the caller's thread, or with none (decision 19).

A drain is a generator: it yields each call that is out, and is resumed with how that ended. `in_this_thread` waits for it.
`Pieces` resumes it in a thread of a bulkhead, as one short piece of work, once the call has ended, its task was cancelled,
or the worker is to stop: meanwhile the call holds no thread and no connection.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from django.db import connection

from embeddings.dispatch import task_queue
from embeddings.dispatch.calls import Call, CallEnd
from embeddings.runtime import leases
from embeddings.runtime.bulkheads import Bulkhead
from embeddings.runtime.retry import DATABASE_AWAY

_POLL_FIRST_S, _POLL_MOST_S = 0.25, 1.0


@dataclass(frozen=True, eq=False)
class Out:
    """A call that is out. `is_broken_off`: whether a cancel of its task ends it; `should_stop`: gives its task back."""

    call: Call
    is_broken_off: bool
    should_stop: Callable[[], bool]


# Yields each call that is out, and is sent how it ended; returns how many tasks were dispatched.
Steps = Generator[Out, CallEnd, int]


def _give_back(out: Out) -> None:
    """The worker is to stop: the call is given up, and its task queued again, uncounted."""
    out.call.future.cancel()
    # Of a task that was removed meanwhile, only the slot is left to give back.
    if not task_queue.give_back(out.call.task):
        task_queue.release_slot(out.call.task)


def _break_off(out: Out) -> None:
    """The task was cancelled: the call is given up, and its slot is free."""
    out.call.future.cancel()
    task_queue.release_slot(out.call.task)


# --- in the caller's thread -------------------------------------------------------------------------------------------
def in_this_thread(steps: Steps) -> int:
    """Takes the steps to their end, waiting for each call."""
    try:
        out = next(steps)
        while True:
            try:
                end = _wait(out)
            except BaseException as error:  # Whatever ends the wait, Ctrl-C too, ends the drain.
                out = steps.throw(error)
            else:
                out = steps.send(end)
    except StopIteration as last:
        return int(last.value)


def _wait(out: Out) -> CallEnd:
    """Waits for the call, and polls whether its task was cancelled or the worker is to stop: then it is given up."""
    call = out.call
    # A caller waits for an interactive text, and may give it up: it is polled for more often.
    poll_most_s = _POLL_FIRST_S if call.task.is_interactive else _POLL_MOST_S
    poll_s, is_cancelled = _POLL_FIRST_S, False
    if call.task.is_interactive:
        _close_connection()
    while True:
        concurrent.futures.wait([call.future], timeout=poll_s)
        if call.future.done():
            return call.end()
        if out.should_stop():
            _give_back(out)
            return None
        # Away for longer than a retry lasts, the database must not cost the call its reply.
        with contextlib.suppress(*DATABASE_AWAY):
            is_cancelled = out.is_broken_off and task_queue.was_removed(call.task)
        if is_cancelled:
            _break_off(out)
            return None
        _close_connection()
        poll_s = min(2 * poll_s, poll_most_s)


def _close_connection() -> None:
    """A call may last for minutes, callers are many, and PostgreSQL's connections few."""
    if not connection.in_atomic_block:
        connection.close()


# --- with no thread -----------------------------------------------------------------------------------------------------
class Pieces:
    """A drain as pieces of work in a bulkhead. `ended` has the number of dispatched tasks, or what a piece raised."""

    def __init__(self, steps: Steps, on: Bulkhead) -> None:
        self.ended: Future[int] = Future()
        self._steps = steps
        self.on = on

    def begin(self) -> None:
        """The first piece, in this thread."""
        self._go_on(lambda: None)

    def resume(self, end_of_call: Callable[[], CallEnd]) -> None:
        """Puts the next piece: the call that was waited for is over, as `end_of_call` tells in the piece."""
        self.on.put(partial(self._go_on, end_of_call))

    def _go_on(self, end_of_call: Callable[[], CallEnd]) -> None:
        try:
            out = self._steps.send(end_of_call())
        except StopIteration as last:
            self.ended.set_result(last.value)
        except BaseException as error:
            # Its call was given up with it; whoever began the drain decides what the error means.
            self.ended.set_exception(error)
        else:
            _parked.add(out, self)


class _Parked:
    """The calls of this process that are out, each of a drain that waits in no thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Out, tuple[Pieces, float]] = {}
        self._looking: contextlib.ExitStack | None = None

    def has_any(self, on: Bulkhead) -> bool:
        """Whether a call is out for a drain of this bulkhead."""
        with self._lock:
            return any(pieces.on is on for pieces, _ in self._waiting.values())

    def add(self, out: Out, pieces: Pieces) -> None:
        with self._lock:
            self._waiting[out] = pieces, time.monotonic()
            if self._looking is None:
                self._looking = contextlib.ExitStack()
                self._looking.enter_context(leases.repeated(self.look, _POLL_FIRST_S))
        # Called at once if the reply is there already.
        out.call.future.add_done_callback(lambda _: self._resume(out, out.call.end))

    def look(self) -> bool:
        """Gives up the calls whose workers are to stop, and has the database asked for cancelled tasks."""
        self.give_back()
        since = time.monotonic() - _POLL_FIRST_S
        waiting: dict[Bulkhead, list[Out]] = defaultdict(list)
        with self._lock:
            if not self._waiting:
                self._looking = None
                return False
            for out, (pieces, parked_at) in self._waiting.items():
                if out.is_broken_off and parked_at <= since:
                    waiting[pieces.on].append(out)
            for on, outs in waiting.items():
                # One question at a time, for all calls together. Within the lock: see `end`.
                on.wake("cancelled", partial(self._break_off_removed, outs))
        return True

    def give_back(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for out in waiting:
            if out.should_stop():
                self._resume(out, partial(_give_back, out))

    def _break_off_removed(self, waiting: list[Out]) -> None:
        # Away for longer than a retry lasts, the database must not cost the calls their replies.
        with contextlib.suppress(*DATABASE_AWAY):
            removed = task_queue.removed_of([out.call.task for out in waiting])
            for out in waiting:
                if out.call.task in removed:
                    self._resume(out, partial(_break_off, out))

    def _resume(self, out: Out, end_of_call: Callable[[], CallEnd]) -> None:
        """Once for each call, whichever comes first: its end, a cancel, or the end of the worker."""
        with self._lock:
            found = self._waiting.pop(out, None)
            if found is not None:
                found[0].resume(end_of_call)


_parked = _Parked()


def end(on: Bulkhead) -> None:
    """Ends the bulkhead of drains that are to stop: each gives its task back."""
    while True:
        _parked.give_back()
        on.end()
        # A call that ended meanwhile had its next piece put in the same moment.
        if not _parked.has_any(on) and on.has_ended:
            return
