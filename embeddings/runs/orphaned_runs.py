"""Runs that nobody attends any more: whoever started them was killed, and no worker is there to go on.

A run is alive while it is attended (its lease is renewed by followers, workers and beat) or some lease of its work is. An
abandoned one ends as `interrupted`, so that the next sweep takes its repositories and goes on from the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Max, Q, QuerySet
from django.db.models.functions import Now

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.models import EmbeddingTask, Repository, RepositoryOutcome, TenantRun
from embeddings.runs import outcomes
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED, OutcomeStatus

_LOOK_EVERY_S = 0.2

Signs = tuple[datetime | None, ...]


def attend(run_id: int) -> None:
    """Someone is at work on the run, or watches over it."""
    TenantRun.objects.filter(pk=run_id, status__in=RUN_UNFINISHED).update(
        alive_until=Now() + timedelta(milliseconds=settings.LEASE_MS)
    )


def interrupt(run_id: int) -> bool:
    """Ends an abandoned run's outcomes as interrupted; its rows stay. False if the run is alive, or finished."""
    if not _is_abandoned(run_id):
        return False
    with transaction.atomic():
        task_queue.lock_run(run_id)
        if not _is_abandoned(run_id):
            return False
        TenantRun.objects.filter(pk=run_id).update(dispatch_allowed=False)
        unfinished = RepositoryOutcome.objects.filter(run=run_id, status__in=OUTCOME_UNFINISHED).order_by("pk")
        for outcome_id in unfinished.values_list("pk", flat=True):
            outcomes.decide(outcome_id, OutcomeStatus.INTERRUPTED, code=codes.RUN_ABANDONED)
    return True


def abandoned_runs() -> list[TenantRun]:
    """The unfinished runs that nobody attends, newest first."""
    unattended = TenantRun.objects.filter(status__in=RUN_UNFINISHED, alive_until__lt=Now()).select_related("provider")
    return [run for run in unattended if _is_abandoned(run.pk)]


def runs_holding(repositories: Sequence[Repository]) -> list[int]:
    """The unfinished runs that have one of these repositories."""
    busy = RepositoryOutcome.objects.filter(repository__in=repositories, status__in=OUTCOME_UNFINISHED)
    return sorted(set(busy.values_list("run", flat=True)))


def at_work_on(repositories: Sequence[Repository]) -> set[int]:
    """Ids of those of the repositories that an unfinished run has which is not abandoned."""
    busy = RepositoryOutcome.objects.filter(repository__in=repositories, status__in=OUTCOME_UNFINISHED)
    pairs = list(busy.values_list("run", "repository"))
    alive = {run_id for run_id in {run_id for run_id, _ in pairs} if not _is_abandoned(run_id)}
    return {repository_id for run_id, repository_id in pairs if run_id in alive}


def wait_for_a_sign(repositories: Sequence[Repository], on_wait: Callable[[], None]) -> None:
    """Waits until each run that holds one of the repositories shows a sign of life, or is abandoned.

    A lease at most: by then it was renewed, or it has run out. Calls `on_wait` once if there is anything to wait for.
    """
    seen = {run_id: _signs(run_id) for run_id in runs_holding(repositories)}
    deadline = time.monotonic() + settings.LEASE_MS / 1000 + 2 * _LOOK_EVERY_S
    if seen:
        on_wait()
    while seen and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        seen = {
            run_id: signs for run_id, signs in seen.items() if _signs(run_id) == signs and not _is_abandoned(run_id)
        }


def _is_abandoned(run_id: int) -> bool:
    unattended = TenantRun.objects.filter(pk=run_id, status__in=RUN_UNFINISHED, alive_until__lt=Now())
    return unattended.exists() and not _tasks(run_id, alive=True).exists() and not _scans(run_id, alive=True).exists()


def _signs(run_id: int) -> Signs:
    """Whatever is renewed or moves while someone is at work."""
    alive_until = TenantRun.objects.filter(pk=run_id, status__in=RUN_UNFINISHED).aggregate(at=Max("alive_until"))["at"]
    task = _tasks(run_id).aggregate(at=Max("lease_expires_at"))["at"]
    scan = _scans(run_id).aggregate(at=Max("scan_lease_expires_at"))["at"]
    return alive_until, task, scan


def _tasks(run_id: int, *, alive: bool = False) -> QuerySet[EmbeddingTask]:
    tasks = EmbeddingTask.objects.filter(Q(settled_at=None) | Q(slot__isnull=False), run=run_id)
    return tasks.filter(lease_expires_at__gte=Now()) if alive else tasks


def _scans(run_id: int, *, alive: bool = False) -> QuerySet[RepositoryOutcome]:
    scans = RepositoryOutcome.objects.filter(run=run_id, status=OutcomeStatus.SCANNING)
    return scans.filter(scan_lease_expires_at__gte=Now()) if alive else scans
