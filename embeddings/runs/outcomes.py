"""Deciding outcomes, once each, and what follows from a decision (docs/architecture.md, Data and states)."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import Count, Exists, OuterRef, Q
from django.utils import timezone

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, FileVersion, KnowledgeRow, Repository, RepositoryOutcome, TenantRun
from embeddings.states import OUTCOME_UNFINISHED, CircuitState, OutcomeStatus, TaskState

BACKOFF_MAX = timedelta(hours=2)
_SUCCESS = (OutcomeStatus.SUCCEEDED, OutcomeStatus.UNCHANGED)


def decide(
    outcome_id: int,
    status: OutcomeStatus,
    *,
    code: str = "",
    source_code: str = "",
    detail: str = "",
    expected: tuple[OutcomeStatus, ...] = OUTCOME_UNFINISHED,
) -> bool:
    """Decides an unfinished outcome and removes its queued tasks: they would decide nothing. False if it was decided.

    The caller holds the run's lock.
    """
    decided = RepositoryOutcome.objects.filter(pk=outcome_id, status__in=expected).update(
        status=status,
        error_code=code,
        source_error_code=source_code[:64],
        error_detail=detail[:1000],
        finished_at=timezone.now(),
    )
    if decided:
        task_queue.remove_queued(code or codes.OUTCOME_DECIDED, outcome=outcome_id)
    return decided == 1


def spare(run_id: int, status: OutcomeStatus, code: str) -> None:
    """Stops the run's dispatch: its queued tasks go, and every outcome with nothing at the provider is decided.

    Dispatched work is left alone and keeps what it earns. The caller holds the run's lock.
    """
    TenantRun.objects.filter(pk=run_id).update(dispatch_allowed=False)
    _lock_unfinished(run_id)
    out = EmbeddingTask.objects.filter(outcome=OuterRef("pk"), state__in=(TaskState.DISPATCHED, TaskState.ANSWERED))
    idle = Q(status=OutcomeStatus.PENDING) | Q(status=OutcomeStatus.EMBEDDING) & ~Exists(out)
    # The outcomes before their tasks: that is the order of locks.
    RepositoryOutcome.objects.filter(idle, run=run_id).update(
        status=status, error_code=code, finished_at=timezone.now()
    )
    task_queue.remove_queued(code, run=run_id)


def _lock_unfinished(run_id: int) -> None:
    """In a statement of its own: the next one then sees what an admission that held an outcome has dispatched."""
    if connection.vendor == "postgresql":
        unfinished = RepositoryOutcome.objects.filter(run=run_id, status__in=OUTCOME_UNFINISHED).order_by("pk")
        list(unfinished.select_for_update(no_key=True).values_list("pk", flat=True))


def stop_reason(run: TenantRun) -> tuple[OutcomeStatus, str]:
    """What becomes of an outcome whose run no longer dispatches."""
    if run.circuit.state == CircuitState.OPEN:
        return OutcomeStatus.DEFERRED, codes.CIRCUIT_OPEN
    if run.cancel_requested_at is not None:
        return OutcomeStatus.CANCELLED, codes.RUN_CANCELLED
    return OutcomeStatus.DEFERRED, codes.GENERATION_CHANGED


# --- what follows from a decision ---------------------------------------------------------------------------------------
def record(outcome: RepositoryOutcome) -> None:
    """Writes a decided outcome's totals and when its repository is due again; idempotent."""
    repository = outcome.repository
    totals = _totals(outcome)
    failures = _failures(outcome, repository)
    with transaction.atomic():
        recorded = RepositoryOutcome.objects.filter(pk=outcome.pk, is_recorded=False).update(is_recorded=True, **totals)
        if not recorded or outcome.status == OutcomeStatus.SKIPPED:
            return
        changes = {"consecutive_failures": failures, "next_due_at": next_due(repository, failures, timezone.now())}
        if outcome.status in _SUCCESS:
            changes["indexed_revision"] = outcome.revision
        Repository.objects.filter(pk=repository.pk).update(**changes)


def recount(outcome: RepositoryOutcome) -> None:
    """Writes the totals of a recorded outcome anew; its decision stands."""
    RepositoryOutcome.objects.filter(pk=outcome.pk, is_recorded=True).update(**_totals(outcome))


def _totals(outcome: RepositoryOutcome) -> dict[str, object]:
    generation = outcome.run.generation_id
    rows = KnowledgeRow.objects.filter(repository=outcome.repository_id, generation=generation)
    counted = rows.aggregate(
        rows=Count("pk"),
        pending=Count("pk", filter=store.PENDING),
        undeliverable=Count("pk", filter=~Q(undeliverable_reason="")),
    )
    versions = FileVersion.objects.filter(file__repository=outcome.repository_id, generation=generation)
    skipped = versions.exclude(skipped_reason="").values_list("skipped_reason").annotate(n=Count("pk"))
    files = versions.filter(skipped_reason="").values("file").distinct().count()
    return {**counted, "files": files, "skipped": {**outcome.skipped, **dict(skipped.order_by("skipped_reason"))}}


def _failures(outcome: RepositoryOutcome, repository: Repository) -> int:
    if outcome.status in _SUCCESS:
        return 0
    failed = outcome.status in (OutcomeStatus.FAILED, OutcomeStatus.INTERRUPTED)
    return repository.consecutive_failures + failed


def next_due(repository: Repository, failures: int, now: datetime) -> datetime:
    """When the schedule takes the repository again: its cadence with a jitter of its own, doubled by each failure."""
    cadence = timedelta(minutes=repository.cadence_minutes)
    if failures:
        cadence = max(cadence, min(cadence * 2 ** min(failures, 10), BACKOFF_MAX))
    return now + cadence * (1 + _jitter(repository))


def _jitter(repository: Repository) -> float:
    """0 to 0.1, the same at every time for one repository."""
    digest = hashlib.blake2b(f"repository {repository.pk}".encode(), digest_size=2).digest()
    return int.from_bytes(digest) / 65535 / 10
