"""The progress of an embedding outcome, from its rows: next batches, or its end (docs/architecture.md, Data and states)."""

from __future__ import annotations

from django.db import transaction
from django.db.models import QuerySet

from embeddings import codes
from embeddings.dispatch import batches, task_queue
from embeddings.errors import DispatchNotAllowed
from embeddings.models import EmbeddingTask, KnowledgeRow, RepositoryOutcome
from embeddings.runs import transitions
from embeddings.states import TASK_UNSETTLED, OutcomeStatus, TaskState
from embeddings.timeouts import is_timeout_code


def advance_outcome(outcome_id: int) -> None:
    """Queues the outcome's next batches, or decides it if nothing is left to do; idempotent."""
    outcome = RepositoryOutcome.objects.select_related(
        "repository", "run__provider", "run__circuit", "run__generation"
    ).get(pk=outcome_id)
    if outcome.status != OutcomeStatus.EMBEDDING:
        return
    if not _failed_tasks(outcome).exists():
        try:
            if batches.refill(outcome):
                return
        except DispatchNotAllowed:
            # The run stopped: what is left to do is decided below.
            pass
    _decide_if_ended(outcome)


def has_pending(outcome: RepositoryOutcome) -> bool:
    """Whether rows of the outcome's repository still wait for a vector in its run's generation."""
    return batches.pending_rows(outcome.repository_id, outcome.run.generation_id).exists()


def _failed_tasks(outcome: RepositoryOutcome) -> QuerySet[EmbeddingTask]:
    return EmbeddingTask.objects.filter(outcome=outcome, state=TaskState.FAILED).order_by("settled_at")


def _decide_if_ended(outcome: RepositoryOutcome) -> None:
    """Decides an outcome by its first failed task, else, with nothing queued or at the provider, by what is stored.

    The failed task is looked for under the run's lock: the last call may have failed a moment ago.
    """
    with transaction.atomic():
        run = task_queue.lock_run(outcome.run_id)
        if failed := _failed_tasks(outcome).first():
            status, code = failure_reason(failed.error_code)
            transitions.decide(outcome.pk, status, code=code, source_code=failed.error_code, detail=failed.error_detail)
        elif EmbeddingTask.objects.filter(outcome=outcome, state__in=TASK_UNSETTLED).exists():
            return
        elif has_pending(outcome):
            if not run.dispatch_allowed:
                status, code = transitions.stop_reason(outcome.run_id)
                transitions.decide(outcome.pk, status, code=code)
        elif _all_undeliverable(outcome):
            transitions.decide(outcome.pk, OutcomeStatus.FAILED, code=codes.ALL_UNDELIVERABLE)
        else:
            transitions.decide(outcome.pk, OutcomeStatus.SUCCEEDED)


def failure_reason(task_code: str) -> tuple[OutcomeStatus, str]:
    """The status and code of an outcome whose task failed with `task_code`."""
    if is_timeout_code(task_code):
        return OutcomeStatus.DEFERRED, codes.PROVIDER_TIMED_OUT
    if task_code == codes.PROVIDER_BUSY:
        return OutcomeStatus.DEFERRED, codes.PROVIDER_BUSY
    if task_code == codes.STORE_FAILED:
        return OutcomeStatus.FAILED, codes.STORE_FAILED
    return OutcomeStatus.FAILED, codes.PROVIDER_FAILED


def _all_undeliverable(outcome: RepositoryOutcome) -> bool:
    rows = KnowledgeRow.objects.filter(repository=outcome.repository_id, generation=outcome.run.generation_id)
    return rows.exists() and not rows.filter(undeliverable_reason="").exists()
