"""Orphaned runs: the process that started one was killed, and no worker goes on with it.

A run is alive while its lease is renewed (by followers, workers and beat), or a lease of its work is. An orphaned run ends as
`interrupted`, so that the next sweep takes its repositories and resumes from the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from django.conf import settings
from django.db import transaction
from django.db.models import Max, Q, QuerySet

from embeddings.dispatch import task_queue
from embeddings.models import EmbeddingTask, Repository, RepositoryOutcome, TenantRun
from embeddings.runs import transitions
from embeddings.runtime.clock import LeaseExpiry
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED, OutcomeStatus

_POLL_S = 0.2


def interrupt(run_id: int) -> bool:
    """Ends an orphaned run's outcomes as interrupted; its rows stay. False if the run is alive, or finished."""
    if not _is_orphaned(run_id):
        return False
    with transaction.atomic():
        task_queue.lock_run(run_id)
        if not _is_orphaned(run_id):
            return False
        transitions.interrupt_run(run_id)
    return True


def orphaned_runs() -> list[TenantRun]:
    """The unfinished runs that no process attends to, newest first."""
    unattended = TenantRun.objects.filter(status__in=RUN_UNFINISHED, alive_until__lt=LeaseExpiry()).select_related(
        "provider"
    )
    return [run for run in unattended if _is_orphaned(run.pk)]


def runs_holding(repositories: Sequence[Repository]) -> list[int]:
    """The unfinished runs that have one of these repositories."""
    busy = RepositoryOutcome.objects.filter(repository__in=repositories, status__in=OUTCOME_UNFINISHED)
    return sorted(set(busy.values_list("run", flat=True)))


def busy_repositories(repositories: Sequence[Repository]) -> set[int]:
    """The ids of those of the repositories that a living run has at work."""
    busy = RepositoryOutcome.objects.filter(repository__in=repositories, status__in=OUTCOME_UNFINISHED)
    pairs = list(busy.values_list("run", "repository"))
    alive = {run_id for run_id in {run_id for run_id, _ in pairs} if not _is_orphaned(run_id)}
    return {repository_id for run_id, repository_id in pairs if run_id in alive}


def wait_for_heartbeats(repositories: Sequence[Repository], on_wait: Callable[[], None]) -> None:
    """Waits until each run that has one of the repositories has renewed a lease, or is orphaned.

    At most a lease: by then it was renewed, or it has run out. Calls `on_wait` once if there is a run to wait for.
    """
    seen = {run_id: _leases(run_id) for run_id in runs_holding(repositories)}
    deadline = time.monotonic() + settings.LEASE_MS / 1000 + 2 * _POLL_S
    if seen:
        on_wait()
    while seen and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        seen = {run: leases for run, leases in seen.items() if _leases(run) == leases and not _is_orphaned(run)}


def _is_orphaned(run_id: int) -> bool:
    unattended = TenantRun.objects.filter(pk=run_id, status__in=RUN_UNFINISHED, alive_until__lt=LeaseExpiry())
    return (
        unattended.exists()
        and not _tasks(run_id).filter(lease_expires_at__gte=LeaseExpiry()).exists()
        and not _scans(run_id).filter(scan_lease_expires_at__gte=LeaseExpiry()).exists()
    )


def _leases(run_id: int) -> tuple[datetime | None, ...]:
    """The latest lease of the run, of its tasks and of its scans: each is renewed while a process is at work."""
    runs = TenantRun.objects.filter(pk=run_id, status__in=RUN_UNFINISHED)
    return (
        runs.aggregate(at=Max("alive_until"))["at"],
        _tasks(run_id).aggregate(at=Max("lease_expires_at"))["at"],
        _scans(run_id).aggregate(at=Max("scan_lease_expires_at"))["at"],
    )


def _tasks(run_id: int) -> QuerySet[EmbeddingTask]:
    return EmbeddingTask.objects.filter(Q(settled_at=None) | Q(slot__isnull=False), run=run_id)


def _scans(run_id: int) -> QuerySet[RepositoryOutcome]:
    return RepositoryOutcome.objects.filter(run=run_id, status=OutcomeStatus.SCANNING)
