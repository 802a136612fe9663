"""An outcome's batches, chosen from its pending rows: rows are the backlog, tasks are only the front of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Length

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, KnowledgeRow, RepositoryOutcome
from embeddings.runtime.retry import retried
from embeddings.states import TASK_UNSETTLED, TaskState

# An outcome's share of the queue: one task at the provider and one waiting; with several slots, one for each and one waiting.
UNSETTLED_MAX = 2


@dataclass(frozen=True)
class Batch:
    """The distinct texts of a task, and the rows that take each one's vector."""

    texts: tuple[str, ...]
    row_ids: tuple[tuple[int, ...], ...]

    def bind(self, vectors: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Each row's vector from `float32[len(texts), dimensions]`."""
        return [(row_id, vector) for ids, vector in zip(self.row_ids, vectors, strict=True) for row_id in ids]


def load(task_id: int) -> Batch:
    """What a queued or dispatched batch task sends; empty if its rows have gone."""
    rows = KnowledgeRow.objects.filter(store.PENDING, task=task_id).order_by("pk")
    grouped: dict[bytes, tuple[str, list[int]]] = {}
    for row_id, text, hash_ in rows.values_list("pk", "text", "text_hash"):
        grouped.setdefault(bytes(hash_), (text, []))[1].append(row_id)
    return Batch(
        texts=tuple(text for text, _ in grouped.values()),
        row_ids=tuple(tuple(ids) for _, ids in grouped.values()),
    )


def pending_rows(repository_id: int, generation_id: int) -> QuerySet[KnowledgeRow]:
    return KnowledgeRow.objects.filter(store.PENDING, repository=repository_id, generation=generation_id)


def refill(outcome: RepositoryOutcome) -> int:
    """Queues the outcome's next batches until it has its share of unsettled tasks. Returns how many were queued.

    Raises DispatchNotAllowed once the run no longer dispatches.
    """
    cap = outcome.run.provider.max_in_flight
    # Admission refuses a cap that makes no sense.
    share = max(UNSETTLED_MAX, min(cap, 64) + 1) if type(cap) is int else UNSETTLED_MAX
    queued = 0
    while True:
        with transaction.atomic():
            run = task_queue.lock_run(outcome.run_id)
            unsettled = EmbeddingTask.objects.filter(outcome=outcome, split_from=None, state__in=TASK_UNSETTLED)
            room = share - unsettled.count()
            row_ids, texts = _choose(outcome, run.generation_id) if room > 0 else ([], 0)
            if not row_ids:
                return queued
            _bind(task_queue.put_batch(outcome, texts), row_ids)
        queued += 1
        if room == 1:
            return queued


def _choose(outcome: RepositoryOutcome, generation_id: int) -> tuple[list[int], int]:
    """The next unbound pending rows, bounded by the provider's count and size of distinct texts."""
    provider = outcome.run.provider
    chosen: list[int] = []
    seen: set[bytes] = set()
    characters = 0
    for row_id, length, hash_ in _unbound(outcome, generation_id):
        is_new = hash_ not in seen
        if is_new and chosen and (len(seen) >= provider.batch_size or characters + length > provider.batch_characters):
            break
        chosen.append(row_id)
        seen.add(hash_)
        characters += length if is_new else 0
    return chosen, len(seen)


def _unbound(outcome: RepositoryOutcome, generation_id: int) -> Iterator[tuple[int, int, bytes]]:
    """Pending rows that no unsettled task has, in order; those whose text is embedded by now take that vector instead."""
    last, page_size = 0, outcome.run.provider.batch_size + 1
    while True:
        page = list(
            pending_rows(outcome.repository_id, generation_id)
            .filter(Q(task=None) | Q(task__settled_at__isnull=False), pk__gt=last)
            .order_by("pk")
            .values_list("pk", Length("text"), "text_hash")[:page_size]
        )
        if not page:
            return
        last = page[-1][0]
        known = store.known_vectors(outcome.repository.tenant_id, generation_id, (bytes(hash_) for _, _, hash_ in page))
        if taken := [(row_id, known[bytes(hash_)]) for row_id, _, hash_ in page if bytes(hash_) in known]:
            # The outcome before the versions: the order of locks.
            task_queue.add_counts(outcome.pk, reused=len(taken))
            store.write_vectors(outcome.repository_id, taken)
        for row_id, length, hash_ in page:
            if bytes(hash_) not in known:
                yield row_id, length, bytes(hash_)


def _bind(task: EmbeddingTask, row_ids: Iterable[int]) -> None:
    KnowledgeRow.objects.filter(pk__in=list(row_ids)).update(task=task)


# --- a refused batch -------------------------------------------------------------------------------------------------
@retried
def split(task: Dispatched, batch: Batch) -> bool:
    """Queues the batch's two halves in its place, so that the refused text ends up alone. False if it is no longer held.

    Where the run no longer dispatches, or the outcome is decided, the task is removed instead.
    """
    outcome = RepositoryOutcome.objects.get(pk=task.of_outcome)
    with transaction.atomic():
        refused = task_queue.refusal(outcome.run_id, outcome.pk)
        if not task_queue.remove_held(task, refused or codes.TASK_SPLIT):
            return False
        if not refused:
            middle, root = len(batch.texts) // 2, root_id(task.id)
            for ids in (batch.row_ids[:middle], batch.row_ids[middle:]):
                half = task_queue.put_batch(outcome, len(ids), split_from_id=root)
                _bind(half, (row_id for group in ids for row_id in group))
    return True


@retried
def root_id(task_id: int) -> int:
    """The batch that this task was first split from; itself if it is whole."""
    return EmbeddingTask.objects.values_list("split_from", flat=True).get(pk=task_id) or task_id


@retried
def has_landed(root: int) -> bool:
    """Whether the provider took some text of this batch, or the control text: then a refusal is due to the text itself."""
    if EmbeddingTask.objects.filter(pk=root, control_passed=True).exists():
        return True
    return EmbeddingTask.objects.filter(split_from=root, state=TaskState.STORED).exists()


@retried
def note_control_passed(root: int) -> bool:
    """Remembers that the provider took the control text. False if the batch has gone."""
    return EmbeddingTask.objects.filter(pk=root).update(control_passed=True) == 1


@retried
def mark_undeliverable(task: Dispatched, batch: Batch, reason: str) -> bool:
    """Marks the rows of a refused text, alone in its batch, undeliverable. False if the task is no longer held."""
    outcome = RepositoryOutcome.objects.get(pk=task.of_outcome)
    with transaction.atomic():
        if not task_queue.remove_held(task, codes.TEXT_UNDELIVERABLE, reason):
            return False
        store.mark_undeliverable(outcome.repository_id, [row_id for ids in batch.row_ids for row_id in ids], reason)
    return True
