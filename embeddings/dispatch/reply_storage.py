"""A reply's vectors, checked and stored with the task's end, outside the slot (docs/architecture.md, Embedding)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from django.db import transaction

from embeddings.dispatch import delivery, task_queue
from embeddings.dispatch.batches import Batch
from embeddings.dispatch.task_queue import Dispatched
from embeddings.errors import ProviderError
from embeddings.knowledge import store as knowledge
from embeddings.models import EmbeddingTask, RepositoryOutcome
from embeddings.providers.base import EmbeddingProvider, RawReply
from embeddings.runtime.retry import retry_on_database_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answered:
    """A reply as it came, for a task whose slot is free again."""

    task: Dispatched
    batch: Batch
    adapter: EmbeddingProvider
    reply: RawReply


def store(answered: Answered) -> None:
    """Checks the reply and stores it with the task's end. Raises what decoding and the database raise."""
    vectors = _decoded(answered)
    if answered.task.is_interactive:
        retry_on_database_error(lambda: _store_interactive(answered.task, vectors))
        delivery.announce(answered.task.id)
    else:
        retry_on_database_error(lambda: _store_batch(answered, vectors))


def store_late(answered: Answered) -> None:
    """Stores the vectors of a task that was cancelled while its call was out; its outcome's decision stands."""
    try:
        vectors = _decoded(answered)
    except ProviderError as error:
        logger.info("a late reply was not stored: %s", type(error).__name__)
    else:
        retry_on_database_error(lambda: _store_late(answered, vectors))


def _decoded(answered: Answered) -> np.ndarray:
    vectors = answered.adapter.decode(answered.reply, len(answered.batch.texts), None)
    retry_on_database_error(lambda: knowledge.learn_dimensions(answered.task.generation_id, vectors.shape[1]))
    return vectors


def _store_interactive(task: Dispatched, vectors: np.ndarray) -> None:
    with transaction.atomic():
        if task_queue.mark_stored(task):
            EmbeddingTask.objects.filter(pk=task.id).update(vectors=delivery.encode(vectors))


def _store_late(answered: Answered, vectors: np.ndarray) -> None:
    rows = answered.batch.bind(vectors)
    with transaction.atomic():
        task_queue.add_counts(answered.task.of_outcome, embedded=len(rows))
        # An outcome past its retention may have gone.
        outcomes = RepositoryOutcome.objects.filter(pk=answered.task.of_outcome)
        for repository_id in outcomes.values_list("repository", flat=True):
            knowledge.write_vectors(repository_id, rows)


def _store_batch(answered: Answered, vectors: np.ndarray) -> None:
    """Vectors, counts and the task's end in one transaction; a holder that was fenced off stores nothing."""
    task, rows = answered.task, answered.batch.bind(vectors)
    repository_id = RepositoryOutcome.objects.values_list("repository", flat=True).get(pk=task.of_outcome)
    with transaction.atomic():
        # The outcome first: the order of locks.
        task_queue.add_counts(task.of_outcome, embedded=len(rows), provider_calls=answered.reply.calls - 1)
        if not task_queue.mark_stored(task):
            transaction.set_rollback(True)
            return
        if untaken := len(rows) - knowledge.write_vectors(repository_id, rows):
            # Rows that have gone, or had a vector by then.
            task_queue.add_counts(task.of_outcome, embedded=-untaken)
