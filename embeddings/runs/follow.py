"""Follows runs to their end, and does their work itself where no worker does: a sweep needs no worker, and survives one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from django.db import connection

from embeddings.dispatch import task_queue, waits
from embeddings.models import TenantRun
from embeddings.runs import sweep
from embeddings.runtime import shutdown, wake_ups
from embeddings.runtime.bulkheads import Bulkhead
from embeddings.runtime.retry import DATABASE_AWAY, retry_on_database_error
from embeddings.states import RUN_UNFINISHED

# How long work must lie undone beside a free slot before the follower steps in: a worker may be on its way to it.
STEP_IN_AFTER_S = 1.0
_ADVANCE_EVERY_S = 1.0
# A drain carries one call at a time. A provider with several slots gets at most so many from one follower.
_DRAINS_MAX = 8
# A command that follows its runs has no one to tell: it waits longer for its database than a transaction is retried.
DATABASE_WAIT_S = 600.0

T = TypeVar("T")
OnProgress = Callable[[list[TenantRun]], None]
# What the follower may do itself: ("scan", run id) or ("drain", provider id).
Work = tuple[str, int]


def follow(
    runs: Sequence[TenantRun], on_progress: OnProgress = lambda runs: None, poll_s: float = 0.2
) -> list[TenantRun]:
    """Follows the runs until each is finished, calling `on_progress` with their rows; returns them as they ended.

    A database that is away costs time alone, up to `DATABASE_WAIT_S`. Interrupted (KeyboardInterrupt), it gives back
    what it had dispatched and leaves the runs as they are.
    """
    followed = TenantRun.objects.filter(pk__in=[run.pk for run in runs]).select_related("circuit", "provider")
    with _StepIn() as step_in:
        while True:
            current = patiently(lambda: list(followed.all()))
            patiently(partial(on_progress, current))
            unfinished = [run for run in current if run.status in RUN_UNFINISHED]
            if not unfinished:
                return current
            patiently(partial(step_in.poll, unfinished))
            step_in.pause(poll_s)


def patiently(transact: Callable[[], T]) -> T:
    """`retry_on_database_error` for as long as a follower waits for its database."""
    return retry_on_database_error(transact, DATABASE_WAIT_S)


class _StepIn:
    """The follower's own work: a drain for each slot that is idle, and one scan at a time for each run."""

    def __init__(self) -> None:
        self._leave = threading.Event()
        self._has_ended_work = threading.Event()
        # With no worker running, step in at once; a worker that starts later shares the rest.
        self._step_in_after_s = 0.0 if wake_ups.no_worker_listens() else STEP_IN_AFTER_S
        self._idle_since: dict[Work, float] = {}
        self._at_work: dict[Work, list[Future[Any]]] = {}
        self._advanced_at = 0.0
        self._pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="sluicegate-follow")
        self._drains = Bulkhead("follow", _DRAINS_MAX, keeps_connections=True)
        self._controls = replace(
            sweep.CONTROLS, should_stop=lambda: self._leave.is_set() or shutdown.requested.is_set()
        )

    def __enter__(self) -> _StepIn:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._pool.shutdown(wait=True)
        waits.end(self._drains)

    def pause(self, seconds: float) -> None:
        """Waits for the next poll: not so long where work that was started here has ended."""
        self._has_ended_work.wait(seconds)
        self._has_ended_work.clear()

    def poll(self, unfinished: Sequence[TenantRun]) -> None:
        """Advances the runs, and starts what has lain undone for long enough."""
        if time.monotonic() - self._advanced_at >= _ADVANCE_EVERY_S:
            self._advanced_at = time.monotonic()
            for run in unfinished:
                sweep.advance(run.pk, heartbeat=True)
        for run in unfinished:
            if self._is_due(("scan", run.pk), sweep.is_claimable(run)):
                self._start(("scan", run.pk), partial(self._pool.submit, self._scan, run.pk))
        for provider_id in {run.provider_id for run in unfinished}:
            if self._is_due(("drain", provider_id), task_queue.wants_drain(provider_id)):
                self._start(("drain", provider_id), partial(self._drain, provider_id), at_most=_DRAINS_MAX)

    def _is_due(self, work: Work, is_undone: bool) -> bool:
        """Whether each poll for `_step_in_after_s` has seen this work undone."""
        if not is_undone:
            self._idle_since.pop(work, None)
            return False
        return time.monotonic() - self._idle_since.setdefault(work, time.monotonic()) >= self._step_in_after_s

    def _start(self, work: Work, begin: Callable[[], Future[Any]], at_most: int = 1) -> None:
        """Begins the work unless it is done `at_most` times at once already.

        Raises what an ended one raised, except where it lost its database: that is started again.
        """
        at_work = self._at_work.setdefault(work, [])
        for ended in [future for future in at_work if future.done()]:
            at_work.remove(ended)
            with contextlib.suppress(*DATABASE_AWAY):
                ended.result()
        if len(at_work) < at_most:
            started = begin()
            started.add_done_callback(lambda _: self._has_ended_work.set())
            at_work.append(started)

    def _scan(self, run_id: int) -> None:
        try:
            while not self._leave.is_set() and sweep.scan_next(run_id):
                pass
        finally:
            connection.close()

    def _drain(self, provider_id: int) -> Future[int]:
        pieces = sweep.drain_in_pieces(provider_id, self._drains, self._controls)
        self._drains.put(pieces.begin)
        return pieces.ended
