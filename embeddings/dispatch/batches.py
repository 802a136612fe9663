"""Choosing an outcome's next batch from its pending rows: rows are the backlog, tasks are only the front of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Length

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, KnowledgeRow, Provider, RepositoryOutcome
from embeddings.states import TASK_UNSETTLED, TaskState

# An outcome's share of the queue: one task at the provider while the next one waits; one for each slot where there are more.
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
    """Puts the outcome's next batches until it has its share of unsettled tasks. Returns how many were put.

    Raises DispatchNotAllowed once the run no longer dispatches.
    """
    put, has_room = 0, True
    while has_room:
        was_put, has_room = _put_next(outcome)
        put += was_put
    return put


def _put_next(outcome: RepositoryOutcome) -> tuple[bool, bool]:
    """Whether a batch was put, and whether there may be room for another."""
    with transaction.atomic():
        run = task_queue.lock_run(outcome.run_id)
        unsettled = EmbeddingTask.objects.filter(outcome=outcome, split_from=None, state__in=TASK_UNSETTLED)
        room = _share(outcome.run.provider) - unsettled.count()
        if room <= 0:
            return False, False
        row_ids, texts = _choose(outcome, run.generation_id)
        if not row_ids:
            return False, False
        _bind(task_queue.put_batch(outcome, texts), row_ids)
    return True, room > 1


def _share(provider: Provider) -> int:
    # A cap that makes no sense is admission's to refuse.
    cap = provider.max_in_flight
    return max(UNSETTLED_MAX, min(cap, 64) + 1) if type(cap) is int else UNSETTLED_MAX


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
        known = _take_known(outcome, generation_id, page)
        for row_id, length, hash_ in page:
            if row_id not in known:
                yield row_id, length, bytes(hash_)


def _take_known(
    outcome: RepositoryOutcome, generation_id: int, page: Sequence[tuple[int, int, bytes | memoryview]]
) -> set[int]:
    tenant_id = outcome.repository.tenant_id
    known = store.known_vectors(tenant_id, generation_id, (bytes(hash_) for _, _, hash_ in page))
    rows = [(row_id, known[bytes(hash_)]) for row_id, _, hash_ in page if bytes(hash_) in known]
    if rows:
        # The outcome before the versions: that is the order of locks.
        RepositoryOutcome.objects.filter(pk=outcome.pk).update(reused=F("reused") + len(rows))
        store.write_vectors(outcome.repository_id, rows)
    return {row_id for row_id, _ in rows}


def _bind(task: EmbeddingTask, row_ids: Iterable[int]) -> None:
    KnowledgeRow.objects.filter(pk__in=list(row_ids)).update(task=task)


# --- a refused batch -------------------------------------------------------------------------------------------------
def split(task: Dispatched, batch: Batch) -> bool:
    """Puts the batch's two halves in its place, so that the guilty text ends up alone. False if it is no longer held.

    A run that no longer dispatches gets the task removed instead.
    """
    outcome = RepositoryOutcome.objects.get(pk=task.of_outcome)
    with transaction.atomic():
        run = task_queue.lock_run(outcome.run_id)
        reason = codes.TASK_SPLIT if run.dispatch_allowed else codes.DISPATCH_STOPPED
        if not task_queue.remove_held(task, reason):
            return False
        if run.dispatch_allowed:
            _put_halves(outcome, root_id(task.id), batch)
    return True


def _put_halves(outcome: RepositoryOutcome, root: int, batch: Batch) -> None:
    middle = len(batch.texts) // 2
    for ids in (batch.row_ids[:middle], batch.row_ids[middle:]):
        half = task_queue.put_batch(outcome, len(ids), split_from_id=root)
        _bind(half, (row_id for group in ids for row_id in group))


def root_id(task_id: int) -> int:
    """The batch that this task was first split from; itself if it is whole."""
    return EmbeddingTask.objects.values_list("split_from", flat=True).get(pk=task_id) or task_id


def has_landed(root: int) -> bool:
    """Whether the provider takes some text of this batch, or took the control text: the fault is then a text's own."""
    if EmbeddingTask.objects.filter(pk=root, control_passed=True).exists():
        return True
    return EmbeddingTask.objects.filter(split_from=root, state=TaskState.STORED).exists()


def condemn(task: Dispatched, batch: Batch, reason: str) -> bool:
    """Marks the rows of a lone refused text undeliverable. False if the task is no longer held."""
    outcome = RepositoryOutcome.objects.get(pk=task.of_outcome)
    with transaction.atomic():
        if not task_queue.remove_held(task, codes.TEXT_UNDELIVERABLE, reason):
            return False
        store.mark_undeliverable(outcome.repository_id, [row_id for ids in batch.row_ids for row_id in ids], reason)
    return True
