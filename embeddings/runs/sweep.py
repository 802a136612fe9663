"""A sweep: runs are started, their repositories scanned, their tasks drained, and each is advanced to its end.

`advance` is idempotent and derives everything from the rows: any process may call it, at any time and any number of times.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from django.conf import settings
from django.db import transaction

from embeddings import codes
from embeddings.dispatch import drain as draining
from embeddings.dispatch import task_queue
from embeddings.dispatch.drain import Controls
from embeddings.dispatch.task_queue import Dispatched
from embeddings.dispatch.waits import Pieces
from embeddings.errors import UsageError
from embeddings.knowledge.source import RevisionMissing, SourceEmpty, SourceError, SourceRefused, SourceStopped
from embeddings.models import Provider, Repository, RepositoryOutcome, TenantRun
from embeddings.runs import circuit, orphaned_runs, progress, scan, totals, transitions
from embeddings.runs.transitions import ScanClaim
from embeddings.runtime import leases, shutdown, wake_ups
from embeddings.runtime.bulkheads import Bulkhead
from embeddings.runtime.retry import DATABASE_AWAY
from embeddings.states import OUTCOME_ACTIVE, OUTCOME_UNFINISHED, RUN_UNFINISHED, OutcomeStatus, RunTrigger

logger = logging.getLogger(__name__)


# --- starting ---------------------------------------------------------------------------------------------------------
def start(
    repositories: Sequence[Repository], *, trigger: RunTrigger, concurrency: int | None = None
) -> list[TenantRun]:
    """Starts one run per embedding provider over these repositories, each with a fresh, closed circuit.

    A repository that is busy in another run gets the outcome `skipped`. Raises UsageError where a tenant has no embedding
    provider, or its provider no embedding model.
    """
    by_provider: dict[Provider, list[Repository]] = defaultdict(list)
    for repository in repositories:
        provider = repository.tenant.embedding_provider
        if provider is None:
            raise UsageError(f"tenant {repository.tenant} has no embedding provider: set one with `tenant add`")
        if not provider.embedding_model:
            raise UsageError(f"provider {provider} has no embedding model: set one with `provider set`")
        by_provider[provider].append(repository)
    task_queue.remove_stranded()
    for run_id in orphaned_runs.runs_holding(repositories):
        orphaned_runs.interrupt(run_id)
        advance(run_id)
    runs = []
    for provider, of_provider in by_provider.items():
        run = transitions.create_run(
            provider, of_provider, trigger=trigger, concurrency=concurrency or settings.SWEEP_CONCURRENCY
        )
        wake_scanners(run)
        runs.append(run)
    return runs


def wake_scanners(run: TenantRun) -> None:
    """Wakes as many scanning workers as the run may have at once."""
    for _ in range(run.concurrency):
        wake_ups.notify_workers(wake_ups.SCAN, run.pk)
    wake_ups.notify_workers(wake_ups.ADVANCE, run.pk)


# --- scanning ---------------------------------------------------------------------------------------------------------
def scan_next(run_id: int) -> bool:
    """Claims one pending repository of the run, scans it and queues its first batches. False if there was none."""
    claim = transitions.claim_scan(run_id)
    if claim is None:
        return False
    with leases.kept(lambda: transitions.renew_scan(claim)):
        _scan(claim)
    advance(run_id, heartbeat=True)
    return True


def _scan(claim: ScanClaim) -> None:
    """Scans the claim's repository; every error ends in its own outcome and never stops the run."""
    outcome = RepositoryOutcome.objects.select_related(
        "repository__tenant", "run__generation__provider", "run__provider"
    ).get(pk=claim.outcome_id)
    controls = scan.ScanControls(should_stop=lambda: shutdown.requested.is_set() or not claim.held.exists())
    try:
        result = scan.scan(outcome.repository, outcome.run.generation, controls)
    except (scan.ScanStopped, SourceStopped):
        transitions.return_scan(claim)
    except SourceError as error:
        # A later sweep mends neither a refused source nor a missing revision; an empty or unreachable one may be back.
        is_permanent = isinstance(error, SourceRefused | RevisionMissing) and not isinstance(error, SourceEmpty)
        status = OutcomeStatus.FAILED if is_permanent else OutcomeStatus.DEFERRED
        transitions.decide_scan(claim, status, error.code, str(error))
    except DATABASE_AWAY:
        # Not the repository's fault: the scan is started again, and ends as interrupted after the third loss.
        logger.exception("scan of outcome %s lost its database", claim.outcome_id)
        transitions.lose_scan(claim)
    except Exception as error:
        # A repository may hold anything: whatever its scan raises fails this outcome alone.
        logger.exception("scan of outcome %s failed", claim.outcome_id)
        transitions.decide_scan(claim, OutcomeStatus.FAILED, codes.SCAN_FAILED, type(error).__name__)
    else:
        is_current = transitions.end_scan(
            claim,
            needs_embedding=result.changed or progress.has_pending(outcome),
            revision=result.revision,
            skipped=dict(result.skipped),
            reused=result.reused,
            deleted=result.deleted,
        )
        if is_current:
            progress.advance_outcome(claim.outcome_id)
            wake_ups.notify_workers(wake_ups.DRAIN, outcome.run.provider_id)


# --- embedding ----------------------------------------------------------------------------------------------------------
def after_task(task: Dispatched) -> None:
    """Takes up a task's end: its outcome goes on or is decided, and its run advances."""
    if task.outcome_id is None or task.run_id is None:
        return
    progress.advance_outcome(task.outcome_id)
    outcome = RepositoryOutcome.objects.select_related("run").get(pk=task.outcome_id)
    if outcome.is_recorded:
        # A call that was out when its outcome was decided still stored what it earned.
        totals.recount(outcome)
    elif outcome.status not in OUTCOME_ACTIVE:
        advance(task.run_id)


CONTROLS = Controls(on_provider_timeout_for=circuit.on_provider_timeout_for, on_task_ended=after_task)


def drain(provider_id: int, controls: Controls = CONTROLS) -> int:
    """Drains the provider's queue under its runs' circuits. Returns how many tasks were dispatched."""
    return draining.drain(provider_id, controls)


def drain_in_pieces(provider_id: int, on: Bulkhead, controls: Controls = CONTROLS) -> Pieces:
    """The same, not begun, in pieces of work: a call that is out holds no thread."""
    return draining.in_pieces(provider_id, controls, on)


# --- advancing ----------------------------------------------------------------------------------------------------------
def advance(run_id: int, *, heartbeat: bool = False) -> TenantRun:
    """Moves the run on as far as its rows allow, and finishes it once every outcome is decided.

    `heartbeat`: on behalf of a process that stays with the run, so that it does not count as orphaned.
    """
    if heartbeat:
        transitions.heartbeat(run_id)
    run = TenantRun.objects.select_related("provider", "generation").get(pk=run_id)
    if run.status not in RUN_UNFINISHED:
        return run
    task_queue.reclaim(run.provider_id)
    transitions.reclaim_scans(run)
    if run.generation.model != run.provider.embedding_model:
        with transaction.atomic():
            task_queue.lock_run(run.pk)
            transitions.stop_dispatch(run.pk, OutcomeStatus.DEFERRED, codes.GENERATION_CHANGED)
    for outcome_id in run.outcomes.filter(status=OutcomeStatus.EMBEDDING).values_list("pk", flat=True):
        progress.advance_outcome(outcome_id)
    totals.record_decided(run)
    transitions.finish_run(run)
    if is_claimable(run):
        wake_ups.notify_workers(wake_ups.SCAN, run.pk)
    return run


def is_claimable(run: TenantRun) -> bool:
    """Whether a pending repository of the run waits for a scanner that the run's concurrency would allow."""
    return (
        run.status in RUN_UNFINISHED
        and run.outcomes.filter(status=OutcomeStatus.PENDING).exists()
        and run.outcomes.filter(status__in=OUTCOME_ACTIVE).count() < run.concurrency
    )


# --- cancelling ---------------------------------------------------------------------------------------------------------
def request_cancel(run: TenantRun) -> None:
    """Cancels what the run has not decided: queued work goes, calls at the provider are given up, scans stop."""
    with transaction.atomic():
        task_queue.lock_provider(run.provider_id)
        task_queue.lock_run(run.pk)
        transitions.cancel_run(run)
    advance(run.pk)


def cancel_outcome(outcome: RepositoryOutcome) -> None:
    """Cancels one repository's part of a run."""
    with transaction.atomic():
        task_queue.lock_provider(outcome.run.provider_id)
        task_queue.lock_run(outcome.run_id)
        transitions.cancel(outcome.pk)
    advance(outcome.run_id)


def cancel_repository(repository: Repository) -> None:
    """Cancels every unfinished outcome of the repository."""
    for outcome in RepositoryOutcome.objects.filter(repository=repository, status__in=OUTCOME_UNFINISHED):
        cancel_outcome(outcome)
