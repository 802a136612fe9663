"""Following runs to their end, and doing the work itself where no worker does: a sweep needs no worker, and survives one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from django.db import connection

from embeddings.dispatch import task_queue
from embeddings.models import TenantRun
from embeddings.runs import sweep
from embeddings.runtime import shutdown, wake_ups
from embeddings.runtime.retry import durably
from embeddings.states import RUN_UNFINISHED

# How long work may lie undone beside a free slot before the follower steps in, where a worker may be on its way to it.
STEP_IN_AFTER_S = 1.0
_ADVANCE_EVERY_S = 1.0
# A drain carries one call at a time: so many of them a provider with several slots gets from one follower.
_DRAINS_MAX = 8

OnProgress = Callable[[list[TenantRun]], None]


def follow(
    runs: Sequence[TenantRun], on_progress: OnProgress = lambda runs: None, poll_s: float = 0.2
) -> list[TenantRun]:
    """Follows the runs until each is finished, calling `on_progress` with their rows; returns them as they ended.

    Interrupted (KeyboardInterrupt), it gives back what it had dispatched and leaves the runs as they are.
    """
    with _StepIn([run.pk for run in runs]) as step_in:
        while True:
            current = list(TenantRun.objects.filter(pk__in=step_in.run_ids).select_related("circuit", "provider"))
            on_progress(current)
            if not any(run.status in RUN_UNFINISHED for run in current):
                return current
            step_in.look(current)
            step_in.pause(poll_s)


@dataclass
class _Idle:
    """How long something has been seen undone, without a break."""

    patience_s: float
    since: dict[tuple[str, int], float] = field(default_factory=dict)

    def long_enough(self, key: tuple[str, int], is_idle: bool) -> bool:
        if not is_idle:
            self.since.pop(key, None)
            return False
        return time.monotonic() - self.since.setdefault(key, time.monotonic()) >= self.patience_s


class _StepIn:
    """The follower's own hands: a drain for each slot that stands idle, and as many scans as a run may have at once."""

    def __init__(self, run_ids: list[int]) -> None:
        self.run_ids = run_ids
        self._leave = threading.Event()
        self._has_ended_work = threading.Event()
        # Nobody can come first where nobody listens; a worker that comes later shares what is left.
        self._idle = _Idle(0.0 if wake_ups.nobody_listens() else STEP_IN_AFTER_S)
        self._at_work: dict[tuple[str, int], list[Future[None]]] = {}
        self._advanced_at = 0.0
        self._pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="sluicegate-follow")

    def __enter__(self) -> _StepIn:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._pool.shutdown(wait=True)

    def pause(self, seconds: float) -> None:
        """Until the next look: shorter where something that was started here has ended."""
        self._has_ended_work.wait(seconds)
        self._has_ended_work.clear()

    def look(self, runs: Sequence[TenantRun]) -> None:
        unfinished = [run for run in runs if run.status in RUN_UNFINISHED]
        if time.monotonic() - self._advanced_at >= _ADVANCE_EVERY_S:
            self._advanced_at = time.monotonic()
            for run in unfinished:
                durably(partial(sweep.attend, run.pk))
        for run in unfinished:
            self._step_in_scanning(run)
        for provider_id in {run.provider_id for run in unfinished}:
            self._step_in_draining(provider_id)

    def _step_in_scanning(self, run: TenantRun) -> None:
        if self._idle.long_enough(("scan", run.pk), sweep.is_claimable(run)):
            self._start(("scan", run.pk), lambda: self._scan(run.pk))

    def _step_in_draining(self, provider_id: int) -> None:
        if self._idle.long_enough(("drain", provider_id), task_queue.stands_idle(provider_id)):
            self._start(("drain", provider_id), lambda: self._drain(provider_id), at_most=_DRAINS_MAX)

    def _start(self, key: tuple[str, int], work: Callable[[], None], at_most: int = 1) -> None:
        """Starts the work unless `at_most` are at it already."""
        at_work = self._at_work.setdefault(key, [])
        for ended in [future for future in at_work if future.done()]:
            at_work.remove(ended)
            # What it raised is the follower's own to hear.
            ended.result()
        if len(at_work) < at_most:
            started = self._pool.submit(_with_own_connection, work)
            started.add_done_callback(lambda _: self._has_ended_work.set())
            at_work.append(started)

    def _scan(self, run_id: int) -> None:
        while not self._leave.is_set() and sweep.scan_next(run_id):
            pass

    def _drain(self, provider_id: int) -> None:
        controls = replace(sweep.CONTROLS, should_stop=lambda: self._leave.is_set() or shutdown.requested.is_set())
        sweep.drain(provider_id, controls)


def _with_own_connection(work: Callable[[], None]) -> None:
    try:
        work()
    finally:
        connection.close()
