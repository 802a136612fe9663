"""A sweep: starts runs, scans their repositories, advances them to their end; turns errors into outcomes.

`advance` is idempotent and derives everything from the rows: whoever calls it, however often, the result is the same.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now
from django.utils import timezone

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.dispatch.drain import Controls
from embeddings.dispatch.drain import drain as drain_until_idle
from embeddings.dispatch.task_queue import Dispatched
from embeddings.errors import UsageError
from embeddings.knowledge import store
from embeddings.knowledge.source import RevisionMissing, SourceEmpty, SourceError, SourceRefused, SourceStopped
from embeddings.models import (
    EmbeddingGeneration,
    Provider,
    Repository,
    RepositoryOutcome,
    RunCircuit,
    TenantRun,
)
from embeddings.runs import circuit, orphaned_runs, outcomes, scan
from embeddings.runs.progress import has_pending, settle_outcome
from embeddings.runtime import leases, shutdown, wake_ups
from embeddings.states import (
    OUTCOME_UNFINISHED,
    RUN_UNFINISHED,
    OutcomeStatus,
    RunStatus,
    RunTrigger,
)

logger = logging.getLogger(__name__)

SCAN_LOSSES_MAX = 3
_ACTIVE = (OutcomeStatus.SCANNING, OutcomeStatus.EMBEDDING)


# --- starting ---------------------------------------------------------------------------------------------------------
def start(
    repositories: Sequence[Repository], *, trigger: RunTrigger, concurrency: int | None = None
) -> list[TenantRun]:
    """Starts one run per embedding provider over these repositories, each with a fresh, closed circuit.

    A repository that is busy in another run gets the outcome `skipped`. Raises UsageError where a tenant has no embedding
    provider, or its provider no embedding model.
    """
    by_provider = _by_provider(repositories)
    for run_id in orphaned_runs.runs_holding(repositories):
        orphaned_runs.interrupt(run_id)
        advance(run_id)
    return [
        _start_run(provider, some, trigger, concurrency or settings.SWEEP_CONCURRENCY)
        for provider, some in by_provider.items()
    ]


def _by_provider(repositories: Sequence[Repository]) -> dict[Provider, list[Repository]]:
    grouped: dict[Provider, list[Repository]] = defaultdict(list)
    for repository in repositories:
        provider = repository.tenant.embedding_provider
        if provider is None:
            raise UsageError(f"tenant {repository.tenant} has no embedding provider: set one with `tenant add`")
        if not provider.embedding_model:
            raise UsageError(f"provider {provider} has no embedding model: set one with `provider set`")
        grouped[provider].append(repository)
    return grouped


def _start_run(
    provider: Provider, repositories: Sequence[Repository], trigger: RunTrigger, concurrency: int
) -> TenantRun:
    generation, _ = EmbeddingGeneration.objects.get_or_create(provider=provider, model=provider.embedding_model)
    with transaction.atomic():
        run = TenantRun.objects.create(
            provider=provider, generation=generation, trigger=trigger, concurrency=concurrency
        )
        RunCircuit.objects.create(run=run)
        # In one order: two starts over the same repositories wait for each other's outcomes on PostgreSQL.
        for repository in sorted(repositories, key=lambda one: one.pk):
            _create_outcome(run, repository)
    ring_run(run)
    return run


def _create_outcome(run: TenantRun, repository: Repository) -> None:
    facts = {"tenant_slug": repository.tenant.slug, "repository_slug": repository.slug}
    try:
        with transaction.atomic():
            RepositoryOutcome.objects.create(run=run, repository=repository, **facts)
    except IntegrityError:
        # The database's own rule: at most one unfinished outcome a repository.
        RepositoryOutcome.objects.create(
            run=run,
            repository=repository,
            status=OutcomeStatus.SKIPPED,
            error_code=codes.REPOSITORY_BUSY,
            error_detail="another run is at work on this repository",
            finished_at=timezone.now(),
            **facts,
        )


def ring_run(run: TenantRun) -> None:
    """Rings as many scanners as the run may have at once."""
    for _ in range(run.concurrency):
        wake_ups.ring(wake_ups.SCAN, run.pk)
    wake_ups.ring(wake_ups.ADVANCE, run.pk)


# --- scanning ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Claim:
    """A repository's scan, held by `token` while its lease is renewed."""

    outcome_id: int
    run_id: int
    token: str


def scan_next(run_id: int) -> bool:
    """Claims one pending repository of the run, scans it and puts its first batches; says whether there was one."""
    claim = _claim(run_id)
    if claim is None:
        return False
    with leases.kept(lambda: _renew(claim)):
        _carry_out(claim)
    attend(run_id)
    return True


def _claim(run_id: int) -> Claim | None:
    with transaction.atomic():
        run = task_queue.lock_run(run_id)
        of_run = RepositoryOutcome.objects.filter(run=run_id)
        concurrency = TenantRun.objects.values_list("concurrency", flat=True).get(pk=run_id)
        if not run.dispatch_allowed or of_run.filter(status__in=_ACTIVE).count() >= concurrency:
            return None
        outcome = of_run.filter(status=OutcomeStatus.PENDING).order_by("pk").first()
        if outcome is None:
            return None
        claim = Claim(outcome.pk, run_id, secrets.token_hex(16))
        of_run.filter(pk=outcome.pk).update(
            status=OutcomeStatus.SCANNING,
            scan_token=claim.token,
            scan_lease_expires_at=_lease(),
            started_at=outcome.started_at or timezone.now(),
        )
        TenantRun.objects.filter(pk=run_id, status=RunStatus.QUEUED).update(
            status=RunStatus.RUNNING, started_at=timezone.now()
        )
    return claim


def _lease() -> object:
    return Now() + timedelta(milliseconds=settings.LEASE_MS)


def _renew(claim: Claim) -> bool:
    held = RepositoryOutcome.objects.filter(pk=claim.outcome_id, status=OutcomeStatus.SCANNING, scan_token=claim.token)
    return held.update(scan_lease_expires_at=_lease()) == 1


def _carry_out(claim: Claim) -> None:
    outcome = RepositoryOutcome.objects.select_related(
        "repository__tenant", "run__generation__provider", "run__provider"
    ).get(pk=claim.outcome_id)
    controls = scan.ScanControls(should_stop=lambda: shutdown.requested.is_set() or not _is_held(claim))
    try:
        result = scan.scan(outcome.repository, outcome.run.generation, controls)
    except (scan.ScanStopped, SourceStopped):
        _return_scan(claim)
    except SourceError as error:
        status = OutcomeStatus.FAILED if _is_own_fault(error) else OutcomeStatus.DEFERRED
        _decide_scan(claim, status, error.code, str(error))
    except Exception as error:
        # Whatever a repository holds, it ends in its own outcome and never stops the run.
        logger.exception("scan of outcome %s failed", claim.outcome_id)
        _decide_scan(claim, OutcomeStatus.FAILED, codes.SCAN_FAILED, type(error).__name__)
    else:
        _after_scan(claim, outcome, result)


def _is_own_fault(error: SourceError) -> bool:
    """What no later sweep mends by itself; an empty or unreachable source may be back."""
    return isinstance(error, SourceRefused | RevisionMissing) and not isinstance(error, SourceEmpty)


def _is_held(claim: Claim) -> bool:
    return RepositoryOutcome.objects.filter(
        pk=claim.outcome_id, status=OutcomeStatus.SCANNING, scan_token=claim.token
    ).exists()


def _return_scan(claim: Claim) -> None:
    """A scan that a shutdown ended goes back uncounted; one that lost its claim changes nothing."""
    RepositoryOutcome.objects.filter(pk=claim.outcome_id, status=OutcomeStatus.SCANNING, scan_token=claim.token).update(
        status=OutcomeStatus.PENDING, scan_token=""
    )


def _decide_scan(claim: Claim, status: OutcomeStatus, code: str = "", detail: str = "") -> None:
    with transaction.atomic():
        task_queue.lock_run(claim.run_id)
        if _is_held(claim):
            outcomes.decide(claim.outcome_id, status, code=code, detail=detail, expected=(OutcomeStatus.SCANNING,))


def _after_scan(claim: Claim, outcome: RepositoryOutcome, result: scan.ScanResult) -> None:
    with transaction.atomic():
        task_queue.lock_run(claim.run_id)
        if not _is_held(claim):
            return
        RepositoryOutcome.objects.filter(pk=claim.outcome_id).update(
            revision=result.revision,
            skipped=dict(result.skipped),
            reused=result.reused,
            deleted=result.deleted,
        )
        if not result.changed and not has_pending(outcome):
            outcomes.decide(claim.outcome_id, OutcomeStatus.UNCHANGED, expected=(OutcomeStatus.SCANNING,))
            return
        RepositoryOutcome.objects.filter(pk=claim.outcome_id).update(status=OutcomeStatus.EMBEDDING)
    settle_outcome(claim.outcome_id)
    wake_ups.ring(wake_ups.DRAIN, outcome.run.provider_id)


# --- embedding ----------------------------------------------------------------------------------------------------------
def after_task(task: Dispatched) -> None:
    """What a task's end means for its outcome and its run."""
    if task.outcome_id is None or task.run_id is None:
        return
    settle_outcome(task.outcome_id)
    outcome = RepositoryOutcome.objects.select_related("run").get(pk=task.outcome_id)
    if outcome.is_recorded:
        # A call that was out when its outcome was decided still stored what it earned.
        outcomes.recount(outcome)
    elif outcome.status not in _ACTIVE:
        advance(task.run_id)


CONTROLS = Controls(on_provider_timeout_for=circuit.on_provider_timeout_for, on_task_ended=after_task)


def drain(provider_id: int, controls: Controls = CONTROLS) -> int:
    """Drains the provider's queue under its runs' circuits. Returns how many tasks were dispatched."""
    return drain_until_idle(provider_id, controls)


# --- advancing ----------------------------------------------------------------------------------------------------------
def advance(run_id: int) -> TenantRun:
    """Moves the run on as far as its rows allow, and finishes it once every outcome is decided."""
    run = TenantRun.objects.select_related("provider", "generation").get(pk=run_id)
    if run.status not in RUN_UNFINISHED:
        return run
    task_queue.reclaim(run.provider_id)
    _reclaim_scans(run)
    if run.generation.model != run.provider.embedding_model:
        _stop(run, OutcomeStatus.DEFERRED, codes.GENERATION_CHANGED)
    for outcome_id in run.outcomes.filter(status=OutcomeStatus.EMBEDDING).values_list("pk", flat=True):
        settle_outcome(outcome_id)
    _record_decided(run)
    _finish(run)
    if is_claimable(run):
        wake_ups.ring(wake_ups.SCAN, run.pk)
    return run


def attend(run_id: int) -> TenantRun:
    """Advances the run on behalf of someone who stays with it."""
    orphaned_runs.attend(run_id)
    return advance(run_id)


def _reclaim_scans(run: TenantRun) -> None:
    lost = RepositoryOutcome.objects.filter(run=run, status=OutcomeStatus.SCANNING, scan_lease_expires_at__lt=Now())
    for outcome in lost:
        with transaction.atomic():
            locked = task_queue.lock_run(run.pk)
            still_lost = lost.filter(pk=outcome.pk, scan_token=outcome.scan_token)
            if not locked.dispatch_allowed:
                run.refresh_from_db()
                status, code = outcomes.stop_reason(run)
            elif outcome.scan_losses + 1 < SCAN_LOSSES_MAX:
                still_lost.update(status=OutcomeStatus.PENDING, scan_token="", scan_losses=outcome.scan_losses + 1)
                continue
            else:
                status, code = OutcomeStatus.INTERRUPTED, codes.SCAN_LOST
            if still_lost.exists():
                outcomes.decide(outcome.pk, status, code=code)


def _stop(run: TenantRun, status: OutcomeStatus, code: str) -> None:
    with transaction.atomic():
        task_queue.lock_run(run.pk)
        outcomes.spare(run.pk, status, code)


def _record_decided(run: TenantRun) -> None:
    decided = run.outcomes.filter(is_recorded=False).exclude(status__in=OUTCOME_UNFINISHED)
    for outcome in decided.select_related("repository", "run"):
        if outcome.status in (OutcomeStatus.SUCCEEDED, OutcomeStatus.UNCHANGED):
            store.promote_generation(outcome.repository, run.generation_id)
        outcomes.record(outcome)


def _finish(run: TenantRun) -> None:
    with transaction.atomic():
        task_queue.lock_run(run.pk)
        if run.outcomes.filter(is_recorded=False).exists():
            # Unfinished, or decided by someone else just now: whoever decided it advances the run after us.
            return
        statuses = set(run.outcomes.values_list("status", flat=True))
        run.refresh_from_db()
        TenantRun.objects.filter(pk=run.pk, status__in=RUN_UNFINISHED).update(
            status=run_status(statuses, was_cancelled=run.cancel_requested_at is not None),
            dispatch_allowed=False,
            finished_at=timezone.now(),
        )
    run.refresh_from_db()


def run_status(statuses: set[str], *, was_cancelled: bool) -> RunStatus:
    """What a run is called once all its outcomes are decided."""
    fine = {OutcomeStatus.SUCCEEDED, OutcomeStatus.UNCHANGED, OutcomeStatus.SKIPPED}
    if was_cancelled:
        return RunStatus.CANCELLED
    if statuses <= fine:
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


def is_claimable(run: TenantRun) -> bool:
    """Whether a pending repository of the run waits for a scanner that the run's concurrency would allow."""
    return (
        run.status in RUN_UNFINISHED
        and run.outcomes.filter(status=OutcomeStatus.PENDING).exists()
        and run.outcomes.filter(status__in=_ACTIVE).count() < run.concurrency
    )


# --- cancelling ---------------------------------------------------------------------------------------------------------
def request_cancel(run: TenantRun) -> None:
    """Cancels what the run has not decided: queued work goes, calls at the provider are given up, scans stop."""
    with transaction.atomic():
        task_queue.lock_provider(run.provider_id)
        task_queue.lock_run(run.pk)
        TenantRun.objects.filter(pk=run.pk, cancel_requested_at=None, status__in=RUN_UNFINISHED).update(
            cancel_requested_at=timezone.now(), dispatch_allowed=False
        )
        for outcome_id in run.outcomes.filter(status__in=OUTCOME_UNFINISHED).values_list("pk", flat=True):
            _cancel(outcome_id)
    advance(run.pk)


def cancel_outcome(outcome: RepositoryOutcome) -> None:
    """Cancels one repository's part of a run."""
    with transaction.atomic():
        task_queue.lock_provider(outcome.run.provider_id)
        task_queue.lock_run(outcome.run_id)
        _cancel(outcome.pk)
    advance(outcome.run_id)


def cancel_repository(repository: Repository) -> None:
    """Cancels whatever is unfinished of the repository."""
    for outcome in RepositoryOutcome.objects.filter(repository=repository, status__in=OUTCOME_UNFINISHED):
        cancel_outcome(outcome)


def _cancel(outcome_id: int) -> None:
    outcomes.decide(outcome_id, OutcomeStatus.CANCELLED, code=codes.RUN_CANCELLED)
    task_queue.cancel_dispatched(codes.RUN_CANCELLED, outcome=outcome_id)
