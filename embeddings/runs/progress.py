"""Deciding an embedding outcome from its rows: next batches, or its end (docs/architecture.md, Data and states)."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import transaction

from embeddings import codes
from embeddings.dispatch import batches, task_queue
from embeddings.errors import DispatchNotAllowed
from embeddings.models import EmbeddingTask, KnowledgeRow, RepositoryOutcome
from embeddings.runs import outcomes
from embeddings.states import TASK_UNSETTLED, OutcomeStatus, TaskState
from embeddings.timeouts import is_provider_timeout


def settle_outcome(outcome_id: int) -> None:
    """Puts the outcome's next batches, or decides it if nothing is left to do; derived from the rows alone."""
    outcome = RepositoryOutcome.objects.select_related(
        "repository", "run__provider", "run__circuit", "run__generation"
    ).get(pk=outcome_id)
    if outcome.status != OutcomeStatus.EMBEDDING:
        return
    if failed := _failed_task(outcome):
        _decide_failed(outcome, failed)
        return
    try:
        put = batches.refill(outcome)
    except DispatchNotAllowed:
        put = 0
    if put == 0:
        _decide_ended(outcome)


def _failed_task(outcome: RepositoryOutcome) -> EmbeddingTask | None:
    return EmbeddingTask.objects.filter(outcome=outcome, state=TaskState.FAILED).order_by("settled_at").first()


def _decide_failed(outcome: RepositoryOutcome, failed: EmbeddingTask) -> None:
    status, code = OutcomeStatus.FAILED, codes.PROVIDER_FAILED
    if is_provider_timeout(_Coded(failed.error_code)):
        status, code = OutcomeStatus.DEFERRED, codes.PROVIDER_TIMED_OUT
    elif failed.error_code == codes.PROVIDER_BUSY:
        status, code = OutcomeStatus.DEFERRED, codes.PROVIDER_BUSY
    elif failed.error_code == codes.STORE_FAILED:
        code = codes.STORE_FAILED
    with transaction.atomic():
        task_queue.lock_run(outcome.run_id)
        outcomes.decide(outcome.pk, status, code=code, source_code=failed.error_code, detail=failed.error_detail)


@dataclass(frozen=True)
class _Coded:
    """A stored code in the shape that the timeout predicate reads."""

    code: str


def _decide_ended(outcome: RepositoryOutcome) -> None:
    """Decides an outcome that has nothing queued or at the provider: by what is stored, and what is still pending."""
    with transaction.atomic():
        run = task_queue.lock_run(outcome.run_id)
        if EmbeddingTask.objects.filter(outcome=outcome, state__in=TASK_UNSETTLED).exists():
            return
        # Looked for once more, now that nothing is out: the last one may have failed since we first looked.
        if failed := _failed_task(outcome):
            _decide_failed(outcome, failed)
        elif has_pending(outcome):
            if run.dispatch_allowed:
                return
            outcome.run.refresh_from_db()
            status, code = outcomes.stop_reason(outcome.run)
            outcomes.decide(outcome.pk, status, code=code)
        elif _all_undeliverable(outcome):
            outcomes.decide(outcome.pk, OutcomeStatus.FAILED, code=codes.ALL_UNDELIVERABLE)
        else:
            outcomes.decide(outcome.pk, OutcomeStatus.SUCCEEDED)


def _all_undeliverable(outcome: RepositoryOutcome) -> bool:
    rows = KnowledgeRow.objects.filter(repository=outcome.repository_id, generation=outcome.run.generation_id)
    return rows.exists() and not rows.filter(undeliverable_reason="").exists()


def has_pending(outcome: RepositoryOutcome) -> bool:
    """Whether rows of the outcome's repository still wait for a vector in its run's generation."""
    return batches.pending_rows(outcome.repository_id, outcome.run.generation_id).exists()
