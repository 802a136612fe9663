"""What a reply becomes: vectors checked, and stored with the task's end, outside the slot (docs/architecture.md, Embedding)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from django.db import transaction
from django.db.models import F

from embeddings.dispatch import delivery, task_queue
from embeddings.dispatch.batches import Batch
from embeddings.dispatch.task_queue import Dispatched
from embeddings.errors import ProviderError
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, RepositoryOutcome
from embeddings.providers.base import EmbeddingProvider, RawReply
from embeddings.runtime.retry import durably

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answered:
    """A reply as it came, for a task whose slot is free again."""

    task: Dispatched
    batch: Batch
    adapter: EmbeddingProvider
    reply: RawReply


def keep(answered: Answered) -> None:
    """Checks the reply and stores it, and the task's end with it. Raises what decoding and the database raise."""
    task = answered.task
    vectors = _decoded(answered)
    if task.is_interactive:
        durably(lambda: _store_interactive(task, vectors))
        delivery.announce(task.id)
    else:
        durably(lambda: _store_batch(answered, vectors))


def keep_late(answered: Answered) -> None:
    """The same for a task that was cancelled meanwhile: its rows take what has come all the same."""
    try:
        vectors = _decoded(answered)
    except ProviderError as error:
        logger.info("a late reply was not kept: %s", type(error).__name__)
    else:
        durably(lambda: _store_late(answered, vectors))


def _decoded(answered: Answered) -> np.ndarray:
    vectors = answered.adapter.decode(answered.reply, len(answered.batch.texts), None)
    store.learn_dimensions(answered.task.generation_id, vectors.shape[1])
    return vectors


def _store_interactive(task: Dispatched, vectors: np.ndarray) -> None:
    with transaction.atomic():
        if task_queue.mark_stored(task):
            EmbeddingTask.objects.filter(pk=task.id).update(vectors=delivery.encode(vectors))


def _store_late(answered: Answered, vectors: np.ndarray) -> None:
    """What a cancelled task's call brings all the same: the rows take it, the outcome's decision stands."""
    outcomes = RepositoryOutcome.objects.filter(pk=answered.task.of_outcome)
    rows = answered.batch.bind(vectors)
    with transaction.atomic():
        outcomes.update(embedded=F("embedded") + len(rows))
        # Past its retention an outcome may have gone.
        for repository_id in outcomes.values_list("repository", flat=True):
            store.write_vectors(repository_id, rows)


def _store_batch(answered: Answered, vectors: np.ndarray) -> None:
    """Vectors, counts and the task's end in one transaction; a holder that was fenced off stores nothing."""
    task = answered.task
    repository_id = RepositoryOutcome.objects.values_list("repository", flat=True).get(pk=task.of_outcome)
    rows = answered.batch.bind(vectors)
    with transaction.atomic():
        outcome = RepositoryOutcome.objects.filter(pk=task.of_outcome)
        # The outcome first: that is the order of locks.
        outcome.update(
            embedded=F("embedded") + len(rows), provider_calls=F("provider_calls") + answered.reply.calls - 1
        )
        if not task_queue.mark_stored(task):
            transaction.set_rollback(True)
            return
        if untaken := len(rows) - store.write_vectors(repository_id, rows):
            # Rows that have gone, or had a vector by then.
            outcome.update(embedded=F("embedded") - untaken)
