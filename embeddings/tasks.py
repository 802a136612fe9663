"""Celery's entry points. Each derives its work from the rows: a lost message loses nothing, and a duplicate does nothing."""

from __future__ import annotations

import logging

from celery import shared_task

from embeddings.dispatch import task_queue
from embeddings.models import TenantRun
from embeddings.runs import retention, schedule, sweep
from embeddings.states import RUN_UNFINISHED

logger = logging.getLogger(__name__)


@shared_task(name="embeddings.drain_provider")
def drain_provider(provider_id: int) -> None:
    """Drains one provider's queue until nothing can be admitted."""
    sweep.drain(provider_id)


@shared_task(name="embeddings.scan_run")
def scan_run(run_id: int) -> None:
    """Scans pending repositories of one run until none can be claimed."""
    if TenantRun.objects.filter(pk=run_id).exists():
        while sweep.scan_next(run_id):
            pass


@shared_task(name="embeddings.advance_run")
def advance_run(run_id: int) -> None:
    """Moves one run on as far as its rows allow."""
    if TenantRun.objects.filter(pk=run_id).exists():
        sweep.advance(run_id, heartbeat=True)


@shared_task(name="embeddings.tick")
def tick() -> None:
    """Beat's round: advances every unfinished run, and wakes a drain wherever work waits beside a free slot."""
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
    schedule.start_due()


@shared_task(name="embeddings.purge")
def purge() -> None:
    """Deletes what has been removed, and facts past their retention."""
    retention.purge()
