"""Interactive embedding: a caller that waits for its vectors, and drains while its own task is still queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from django.db import connection

from embeddings import codes
from embeddings.dispatch import delivery, task_queue
from embeddings.errors import EmbeddingFailed, TaskExpired, TaskRemoved, TextRefused
from embeddings.models import EmbeddingGeneration, EmbeddingTask, Provider
from embeddings.runs import sweep
from embeddings.states import TaskState

# A caller's cancel must have reached the model server's socket within a second.
_LOOK_EVERY_S = 0.25


def embed_texts(
    provider: Provider,
    texts: Sequence[str],
    *,
    generation: EmbeddingGeneration | None = None,
    patience_ms: int | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """`float32[len(texts), dimensions]`, ahead of any batch. Waits `patience_ms` (default: the query timeout) for its turn.

    Raises TaskExpired when its turn did not come, TaskRemoved when cancelled, TextRefused where the provider will not take
    the texts, EmbeddingFailed with any other failure's own code (docs/architecture.md, Embedding). The caller hears of a
    cancel at once, whatever the call that is out does.
    """
    if generation is None:
        generation, _ = EmbeddingGeneration.objects.get_or_create(provider=provider, model=provider.embedding_model)
    sendable = [_sendable(text) for text in texts]
    task = task_queue.put_interactive(provider, generation, sendable, patience_ms or provider.query_timeout_ms)
    drainer: threading.Thread | None = None
    while True:
        row = _look(task)
        if row.state == TaskState.QUEUED and (drainer is None or not drainer.is_alive()):
            drainer = _start_drainer(row)
        elif row.settled_at is not None:
            return _result(row)
        if is_cancelled():
            _cancel(task)
            raise TaskRemoved
        # The bell is the common way; the row is the truth.
        connection.close() if not connection.in_atomic_block else None
        delivery.wait(task.pk, _LOOK_EVERY_S)


def _sendable(text: str) -> str:
    """Without what neither a database nor a request can carry: NUL, and halves of surrogate pairs."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def _look(task: EmbeddingTask) -> EmbeddingTask:
    return EmbeddingTask.objects.get(pk=task.pk)


def _start_drainer(task: EmbeddingTask) -> threading.Thread:
    """Runs drain steps while the task is queued, in a thread of its own: its call may outlive the caller's patience."""
    thread = threading.Thread(target=_drain_until_dispatched, args=(task,), name="sluicegate-drain", daemon=True)
    thread.start()
    return thread


def _drain_until_dispatched(task: EmbeddingTask) -> None:
    still_queued = EmbeddingTask.objects.filter(pk=task.pk, state=TaskState.QUEUED)
    controls = replace(sweep.CONTROLS, goes_on=still_queued.exists)
    try:
        sweep.drain(task.provider_id, controls)
    finally:
        connection.close()


def _result(row: EmbeddingTask) -> np.ndarray:
    if row.state == TaskState.STORED:
        return delivery.decode(row.vectors)
    if row.state == TaskState.FAILED:
        raise _failure(row)
    if row.error_code == codes.EXPIRED:
        raise TaskExpired("the embedding provider did not come to this text in time")
    raise TaskRemoved(row.error_code)


def _failure(row: EmbeddingTask) -> EmbeddingFailed | TextRefused:
    said = row.error_detail or row.error_code
    if row.error_code == TextRefused.code:
        return TextRefused(said)
    return EmbeddingFailed(said, code=row.error_code)


def _cancel(task: EmbeddingTask) -> None:
    task_queue.remove_queued(codes.RUN_CANCELLED, pk=task.pk)
    task_queue.cancel_dispatched(codes.RUN_CANCELLED, pk=task.pk)
