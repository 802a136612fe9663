"""The run's circuit: closed at birth, opened at most once by a final provider timeout, gone with its run.

No clock, no half-open, no threshold: it is no rolling-window breaker (docs/architecture.md, Embedding).
"""

from __future__ import annotations

import logging
from functools import partial

from django.db import transaction
from django.utils import timezone

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched
from embeddings.models import RepositoryOutcome, RunCircuit
from embeddings.runs import outcomes
from embeddings.runtime.retry import durably
from embeddings.states import CircuitState, OutcomeStatus
from embeddings.timeouts import OnProviderTimeout

logger = logging.getLogger(__name__)


def on_provider_timeout_for(task: Dispatched) -> OnProviderTimeout | None:
    """The owner's callback for this task: a run's tasks open its circuit, an interactive caller's open nothing."""
    return None if task.run_id is None else partial(open_for, task)


def open_for(task: Dispatched, error: BaseException) -> None:
    """Opens the circuit of the task's run before the slot is given up: one durable transaction, retried within a bound.

    The task's outcome keeps its provider timeout. If the circuit was still closed, nothing more of this run is
    dispatched, and outcomes with nothing at the provider are decided as spared.
    """
    durably(lambda: _open(task, error))


def _open(task: Dispatched, error: BaseException) -> None:
    assert task.run_id is not None  # noqa: S101  (on_provider_timeout_for)
    with transaction.atomic():
        task_queue.lock_run(task.run_id)
        if not task_queue.is_held(task):
            return
        source_code = str(getattr(error, "code", ""))
        outcomes.decide(
            task.of_outcome,
            OutcomeStatus.DEFERRED,
            code=codes.PROVIDER_TIMED_OUT,
            source_code=source_code,
            detail=str(error),
        )
        if _flip(task, source_code, str(error)):
            outcomes.spare(task.run_id, OutcomeStatus.DEFERRED, codes.CIRCUIT_OPEN)
    logger.warning("run %s: circuit open after %s", task.run_id, source_code)


def _flip(task: Dispatched, source_code: str, message: str) -> bool:
    outcome = RepositoryOutcome.objects.get(pk=task.of_outcome)
    return (
        RunCircuit.objects.filter(run=task.run_id, state=CircuitState.CLOSED).update(
            state=CircuitState.OPEN,
            opened_at=timezone.now(),
            reason_code=codes.CIRCUIT_OPEN,
            source_error_code=source_code[:64],
            opened_by=str(outcome),
            message=message[:500],
        )
        == 1
    )
