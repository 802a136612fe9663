"""Every transition of a run and of its outcomes, each a compare-and-set (docs/architecture.md, Data and states).

Nothing else writes the states of `TenantRun` and `RepositoryOutcome`; the circuit's own flip stands in `circuit`, those of
tasks in `dispatch.task_queue`. "The caller holds the run's lock" means `task_queue.lock_run` in the same transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Coalesce, Now

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.models import (
    EmbeddingGeneration,
    EmbeddingTask,
    Provider,
    Repository,
    RepositoryOutcome,
    RunCircuit,
    TenantRun,
)
from embeddings.runtime.clock import LeaseExpiry
from embeddings.runtime.retry import retried
from embeddings.states import (
    OUTCOME_ACTIVE,
    OUTCOME_UNFINISHED,
    RUN_UNFINISHED,
    CircuitState,
    OutcomeStatus,
    RunStatus,
    RunTrigger,
    TaskState,
)

SCAN_LOSSES_MAX = 3


# --- a run ------------------------------------------------------------------------------------------------------------
def create_run(
    provider: Provider, repositories: Sequence[Repository], *, trigger: RunTrigger, concurrency: int
) -> TenantRun:
    """A queued run with a closed circuit and one outcome for each repository: pending, or skipped where another run has it."""
    generation, _ = EmbeddingGeneration.objects.get_or_create(provider=provider, model=provider.embedding_model)
    with transaction.atomic():
        run = TenantRun.objects.create(
            provider=provider,
            generation=generation,
            trigger=trigger,
            concurrency=concurrency,
            alive_until=_a_lease_from_now(),
        )
        run.refresh_from_db()
        RunCircuit.objects.create(run=run)
        # In one order: on PostgreSQL, two starts over the same repositories wait for each other's outcomes.
        for repository in sorted(repositories, key=lambda one: one.pk):
            _create_outcome(run, repository)
    return run


def _create_outcome(run: TenantRun, repository: Repository) -> None:
    names = {"tenant_slug": repository.tenant.slug, "repository_slug": repository.slug}
    try:
        with transaction.atomic():
            RepositoryOutcome.objects.create(run=run, repository=repository, **names)
    except IntegrityError:
        # The database's own rule: at most one unfinished outcome for each repository.
        RepositoryOutcome.objects.create(
            run=run,
            repository=repository,
            status=OutcomeStatus.SKIPPED,
            error_code=codes.REPOSITORY_BUSY,
            error_detail="another run is at work on this repository",
            finished_at=Now(),
            **names,
        )


def heartbeat(run_id: int) -> None:
    """Renews the run's lease: a worker, a follower or beat attends to it."""
    TenantRun.objects.filter(pk=run_id, status__in=RUN_UNFINISHED).update(alive_until=_a_lease_from_now())


def stop_dispatch(run_id: int, status: OutcomeStatus, code: str) -> None:
    """Stops the run's dispatch, removes its queued tasks, and decides every outcome that has no task at the provider.

    Dispatched work is left alone and keeps what it earns. The caller holds the run's lock.
    """
    TenantRun.objects.filter(pk=run_id).update(dispatch_allowed=False)
    if connection.vendor == "postgresql":
        # A statement of its own: the next one then sees what an admission that held an outcome has dispatched.
        unfinished = RepositoryOutcome.objects.filter(run=run_id, status__in=OUTCOME_UNFINISHED).order_by("pk")
        list(unfinished.select_for_update(no_key=True).values_list("pk", flat=True))
    out = EmbeddingTask.objects.filter(outcome=OuterRef("pk"), state__in=(TaskState.DISPATCHED, TaskState.ANSWERED))
    idle = Q(status=OutcomeStatus.PENDING) | Q(status=OutcomeStatus.EMBEDDING) & ~Exists(out)
    # Outcomes before tasks: the order of locks.
    RepositoryOutcome.objects.filter(idle, run=run_id).update(status=status, error_code=code, finished_at=Now())
    task_queue.remove_queued(code, run=run_id)


def cancel_run(run: TenantRun) -> None:
    """Cancels the run and every outcome that is not decided. The caller holds the provider's lock and the run's."""
    TenantRun.objects.filter(pk=run.pk, cancel_requested_at=None, status__in=RUN_UNFINISHED).update(
        cancel_requested_at=Now(), dispatch_allowed=False
    )
    for outcome_id in run.outcomes.filter(status__in=OUTCOME_UNFINISHED).values_list("pk", flat=True):
        cancel(outcome_id)


def interrupt_run(run_id: int) -> None:
    """Stops an orphaned run and decides what is left of it as interrupted; its rows stay. The caller holds the run's lock."""
    TenantRun.objects.filter(pk=run_id).update(dispatch_allowed=False)
    unfinished = RepositoryOutcome.objects.filter(run=run_id, status__in=OUTCOME_UNFINISHED).order_by("pk")
    for outcome_id in unfinished.values_list("pk", flat=True):
        decide(outcome_id, OutcomeStatus.INTERRUPTED, code=codes.RUN_ABANDONED)


def finish_run(run: TenantRun) -> None:
    """Finishes the run once every outcome is decided and recorded, and reads its row again."""
    with transaction.atomic():
        task_queue.lock_run(run.pk)
        # One that was decided a moment ago is not recorded yet: its decider advances the run again.
        if not run.outcomes.filter(is_recorded=False).exists():
            # There is none: deciding removes an outcome's. Held here too, since nothing would ever dispatch it.
            task_queue.remove_queued(codes.OUTCOME_DECIDED, run=run.pk)
            run.refresh_from_db()
            statuses = set(run.outcomes.values_list("status", flat=True))
            TenantRun.objects.filter(pk=run.pk, status__in=RUN_UNFINISHED).update(
                status=run_status(statuses, was_cancelled=run.cancel_requested_at is not None),
                dispatch_allowed=False,
                finished_at=Now(),
            )
    run.refresh_from_db()


def run_status(statuses: set[str], *, was_cancelled: bool) -> RunStatus:
    """The status of a run whose outcomes, all decided, have these statuses."""
    if was_cancelled:
        return RunStatus.CANCELLED
    if statuses <= {OutcomeStatus.SUCCEEDED, OutcomeStatus.UNCHANGED, OutcomeStatus.SKIPPED}:
        return RunStatus.COMPLETED
    for status, named in (
        (OutcomeStatus.FAILED, RunStatus.FAILED),
        (OutcomeStatus.INTERRUPTED, RunStatus.INTERRUPTED),
        (OutcomeStatus.DEFERRED, RunStatus.DEFERRED),
        (OutcomeStatus.CANCELLED, RunStatus.CANCELLED),
    ):
        if statuses == {status}:
            return named
    return RunStatus.DEGRADED


# --- an outcome's scan ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ScanClaim:
    """One process's right to scan an outcome's repository. `token` fences: a holder of another one changes nothing."""

    outcome_id: int
    run_id: int
    token: str

    @property
    def held(self) -> QuerySet[RepositoryOutcome]:
        """The outcome while the claim is held, else no row."""
        return RepositoryOutcome.objects.filter(
            pk=self.outcome_id, status=OutcomeStatus.SCANNING, scan_token=self.token
        )


def claim_scan(run_id: int) -> ScanClaim | None:
    """Claims the run's next pending outcome, if the run dispatches and its concurrency allows another."""
    with transaction.atomic():
        run = task_queue.lock_run(run_id)
        of_run = RepositoryOutcome.objects.filter(run=run_id)
        concurrency = TenantRun.objects.values_list("concurrency", flat=True).get(pk=run_id)
        if not run.dispatch_allowed or of_run.filter(status__in=OUTCOME_ACTIVE).count() >= concurrency:
            return None
        outcome = of_run.filter(status=OutcomeStatus.PENDING).order_by("pk").first()
        if outcome is None:
            return None
        claim = ScanClaim(outcome.pk, run_id, secrets.token_hex(16))
        of_run.filter(pk=outcome.pk).update(
            status=OutcomeStatus.SCANNING,
            scan_token=claim.token,
            scan_lease_expires_at=_a_lease_from_now(),
            started_at=Coalesce("started_at", Now()),
        )
        TenantRun.objects.filter(pk=run_id, status=RunStatus.QUEUED).update(status=RunStatus.RUNNING, started_at=Now())
    return claim


def renew_scan(claim: ScanClaim) -> bool:
    """Renews the claim's lease. False once the claim is lost."""
    return claim.held.update(scan_lease_expires_at=_a_lease_from_now()) == 1


@retried
def return_scan(claim: ScanClaim) -> None:
    """Returns a scan that a shutdown ended, uncounted; a lost claim changes nothing."""
    claim.held.update(status=OutcomeStatus.PENDING, scan_token="")


@retried
def lose_scan(claim: ScanClaim) -> None:
    """Gives up a scan that its database left alone: the next `advance` reclaims it as a lost one."""
    claim.held.update(scan_lease_expires_at=Now() - timedelta(seconds=1))


@retried
def decide_scan(claim: ScanClaim, status: OutcomeStatus, code: str = "", detail: str = "") -> None:
    """Decides an outcome whose scan ended it; a lost claim changes nothing."""
    with transaction.atomic():
        task_queue.lock_run(claim.run_id)
        if claim.held.exists():
            decide(claim.outcome_id, status, code=code, detail=detail, expected=(OutcomeStatus.SCANNING,))


@retried
def end_scan(claim: ScanClaim, *, needs_embedding: bool, **facts: object) -> bool:
    """Writes what the scan found; the outcome goes on to embedding, or is unchanged. False if the claim is lost."""
    with transaction.atomic():
        task_queue.lock_run(claim.run_id)
        if claim.held.update(**facts) == 0:
            return False
        if needs_embedding:
            claim.held.update(status=OutcomeStatus.EMBEDDING)
        else:
            decide(claim.outcome_id, OutcomeStatus.UNCHANGED, expected=(OutcomeStatus.SCANNING,))
    return True


def reclaim_scans(run: TenantRun) -> None:
    """Returns scans whose lease was lost to pending; the third loss interrupts, and a run that stopped decides them."""
    lost = RepositoryOutcome.objects.filter(
        run=run, status=OutcomeStatus.SCANNING, scan_lease_expires_at__lt=LeaseExpiry()
    )
    for outcome in lost:
        with transaction.atomic():
            is_allowed = task_queue.lock_run(run.pk).dispatch_allowed
            still_lost = lost.filter(pk=outcome.pk, scan_token=outcome.scan_token)
            if is_allowed and outcome.scan_losses + 1 < SCAN_LOSSES_MAX:
                still_lost.update(status=OutcomeStatus.PENDING, scan_token="", scan_losses=outcome.scan_losses + 1)
            elif still_lost.exists():
                status, code = (OutcomeStatus.INTERRUPTED, codes.SCAN_LOST) if is_allowed else stop_reason(run.pk)
                decide(outcome.pk, status, code=code)


def _a_lease_from_now() -> CombinedExpression:
    return Now() + timedelta(milliseconds=settings.LEASE_MS)


# --- an outcome's end -------------------------------------------------------------------------------------------------
def decide(
    outcome_id: int,
    status: OutcomeStatus,
    *,
    code: str = "",
    source_code: str = "",
    detail: str = "",
    expected: tuple[OutcomeStatus, ...] = OUTCOME_UNFINISHED,
) -> bool:
    """Decides an unfinished outcome and removes its queued tasks. False if it was decided before.

    The caller holds the run's lock.
    """
    decided = RepositoryOutcome.objects.filter(pk=outcome_id, status__in=expected).update(
        status=status,
        error_code=code,
        source_error_code=source_code[:64],
        error_detail=detail[:1000],
        finished_at=Now(),
    )
    if decided:
        task_queue.remove_queued(code or codes.OUTCOME_DECIDED, outcome=outcome_id)
    return decided == 1


def cancel(outcome_id: int) -> None:
    """Cancels one outcome and its tasks, dispatched ones too. The caller holds the provider's lock and the run's."""
    decide(outcome_id, OutcomeStatus.CANCELLED, code=codes.RUN_CANCELLED)
    task_queue.cancel_dispatched(codes.RUN_CANCELLED, outcome=outcome_id)


def stop_reason(run_id: int) -> tuple[OutcomeStatus, str]:
    """The status and code of an outcome whose run no longer dispatches."""
    run = TenantRun.objects.select_related("circuit").get(pk=run_id)
    if run.circuit.state == CircuitState.OPEN:
        return OutcomeStatus.DEFERRED, codes.CIRCUIT_OPEN
    if run.cancel_requested_at is not None:
        return OutcomeStatus.CANCELLED, codes.RUN_CANCELLED
    return OutcomeStatus.DEFERRED, codes.GENERATION_CHANGED
