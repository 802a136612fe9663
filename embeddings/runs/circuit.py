"""The run's circuit: closed at birth, opened at most once by a final provider timeout, gone with its run.

It has no clock, no half-open state and no threshold: it is not a rolling-window breaker (docs/architecture.md, Embedding).
"""

from __future__ import annotations

import logging
from functools import partial

from django.db import transaction
from django.db.models.functions import Now

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched
from embeddings.models import RepositoryOutcome, RunCircuit
from embeddings.runs import transitions
from embeddings.runtime.retry import retry_on_database_error
from embeddings.states import CircuitState, OutcomeStatus
from embeddings.timeouts import OnProviderTimeout

logger = logging.getLogger(__name__)


def on_provider_timeout_for(task: Dispatched) -> OnProviderTimeout | None:
    """The owner's callback for this task: a run's task opens its circuit, an interactive caller's opens nothing."""
    return None if task.run_id is None else partial(open_for, task)


def open_for(task: Dispatched, error: BaseException) -> None:
    """Opens the circuit of the task's run before the slot is freed: one durable transaction, retried within a bound.

    The task's outcome keeps its provider timeout. If the circuit was still closed, the run dispatches nothing more, and
    outcomes with nothing at the provider are deferred with the circuit's code.
    """
    retry_on_database_error(lambda: _open(task, error))


def _open(task: Dispatched, error: BaseException) -> None:
    assert task.run_id is not None  # noqa: S101  (on_provider_timeout_for)
    source_code = str(getattr(error, "code", ""))
    with transaction.atomic():
        task_queue.lock_run(task.run_id)
        if not task_queue.is_held(task):
            return
        transitions.decide(
            task.of_outcome,
            OutcomeStatus.DEFERRED,
            code=codes.PROVIDER_TIMED_OUT,
            source_code=source_code,
            detail=str(error),
        )
        opened = RunCircuit.objects.filter(run=task.run_id, state=CircuitState.CLOSED).update(
            state=CircuitState.OPEN,
            opened_at=Now(),
            reason_code=codes.CIRCUIT_OPEN,
            source_error_code=source_code[:64],
            opened_by=str(RepositoryOutcome.objects.get(pk=task.of_outcome)),
            message=str(error)[:500],
        )
        if opened:
            transitions.stop_dispatch(task.run_id, OutcomeStatus.DEFERRED, codes.CIRCUIT_OPEN)
    logger.warning("run %s: circuit open after %s", task.run_id, source_code)
