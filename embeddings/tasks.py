"""Celery's entry points. Each derives its work from the rows: a lost message loses nothing, and a duplicate does nothing.

A message is handed over to the threads of its kind of work, so that Celery's own pool is always free to take the next.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial

from celery import shared_task

from embeddings.dispatch import task_queue
from embeddings.models import TenantRun
from embeddings.runs import retention, schedule, sweep
from embeddings.runtime import bulkheads
from embeddings.states import RUN_UNFINISHED

logger = logging.getLogger(__name__)


@shared_task(name="embeddings.drain_provider")
def drain_provider(provider_id: int) -> None:
    """Drains one provider's queue until nothing can be admitted."""
    bulkheads.DRAINS.wake(provider_id, partial(begin_drain, provider_id))


def begin_drain(provider_id: int) -> None:
    pieces = sweep.drain_in_pieces(provider_id, bulkheads.DRAINS)
    pieces.ended.add_done_callback(partial(_log_failure, provider_id))
    pieces.begin()


def _log_failure(provider_id: int, ended: Future[int]) -> None:
    if error := ended.exception():
        logger.error("the drain of provider %s failed", provider_id, exc_info=error)


@shared_task(name="embeddings.scan_run")
def scan_run(run_id: int) -> None:
    """Scans pending repositories of one run until none can be claimed."""
    bulkheads.SCANS.wake(run_id, partial(scan_all, run_id))


def scan_all(run_id: int) -> None:
    if TenantRun.objects.filter(pk=run_id).exists():
        while sweep.scan_next(run_id):
            pass


@shared_task(name="embeddings.advance_run")
def advance_run(run_id: int) -> None:
    """Moves one run on as far as its rows allow."""
    bulkheads.ROUNDS.wake(("advance", run_id), partial(advance_one, run_id))


def advance_one(run_id: int) -> None:
    if TenantRun.objects.filter(pk=run_id).exists():
        sweep.advance(run_id, heartbeat=True)


@shared_task(name="embeddings.tick")
def tick() -> None:
    """Beat's round."""
    bulkheads.ROUNDS.wake("tick", go_round)


def go_round() -> None:
    """Advances every unfinished run, and wakes a drain wherever work waits beside a free slot."""
    for run_id in TenantRun.objects.filter(status__in=RUN_UNFINISHED).values_list("pk", flat=True):
        try:
            sweep.advance(run_id, heartbeat=True)
        except Exception:
            # One run's trouble, whatever it is, must not stop the others; the next round tries again.
            logger.exception("run %s could not be advanced", run_id)
    task_queue.remove_stranded()
    for provider_id in task_queue.providers_with_work():
        drain_provider.delay(provider_id)


@shared_task(name="embeddings.start_due")
def start_due() -> None:
    """Starts a run over the repositories that are due, at most one unfinished scheduled run per provider."""
    bulkheads.ROUNDS.wake("start due", schedule.start_due)


@shared_task(name="embeddings.purge")
def purge() -> None:
    """Deletes what has been removed, and facts past their retention."""
    bulkheads.PURGES.wake("embeddings", retention.purge)
