"""Interactive embedding: the caller waits for its vectors, and drains the queue while its own task is queued."""

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

# A caller's cancel must reach the model server's socket within a second.
_POLL_S = 0.25


def embed_texts(
    provider: Provider,
    texts: Sequence[str],
    *,
    generation: EmbeddingGeneration | None = None,
    timeout_ms: int | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """Embeds the texts ahead of any batch; returns `float32[len(texts), dimensions]`.

    Waits up to `timeout_ms` (default: the provider's query timeout) to be dispatched. A cancel ends the wait at once,
    even while the call is in flight. Raises TaskExpired if the texts were not dispatched in time, TaskRemoved if
    cancelled, TextRefused if the provider refuses the texts, and EmbeddingFailed with the code of any other failure
    (docs/architecture.md, Embedding).
    """
    if generation is None:
        generation, _ = EmbeddingGeneration.objects.get_or_create(provider=provider, model=provider.embedding_model)
    # NUL and lone surrogates can be neither stored nor sent.
    sendable = [text.replace("\0", " ").encode("utf-8", "replace").decode() for text in texts]
    task = task_queue.put_interactive(provider, generation, sendable, timeout_ms or provider.query_timeout_ms)
    drainer: threading.Thread | None = None
    while True:
        row = EmbeddingTask.objects.get(pk=task.pk)
        if row.state == TaskState.QUEUED and (drainer is None or not drainer.is_alive()):
            # In a thread, because the call may outlive the caller's timeout.
            drainer = threading.Thread(
                target=_drain_until_dispatched, args=(row,), name="sluicegate-drain", daemon=True
            )
            drainer.start()
        elif row.settled_at is not None:
            return _vectors_of(row)
        if is_cancelled():
            task_queue.remove_queued(codes.RUN_CANCELLED, pk=task.pk)
            task_queue.cancel_dispatched(codes.RUN_CANCELLED, pk=task.pk)
            raise TaskRemoved
        # No connection is held while waiting. The wake-up may be lost, so the row is read again in any case.
        if not connection.in_atomic_block:
            connection.close()
        delivery.wait(task.pk, _POLL_S)


def _drain_until_dispatched(task: EmbeddingTask) -> None:
    still_queued = EmbeddingTask.objects.filter(pk=task.pk, state=TaskState.QUEUED)
    controls = replace(sweep.CONTROLS, goes_on=still_queued.exists)
    try:
        sweep.drain(task.provider_id, controls)
    finally:
        connection.close()


def _vectors_of(row: EmbeddingTask) -> np.ndarray:
    """The settled task's vectors; raises what `embed_texts` documents if it has none."""
    if row.state == TaskState.STORED:
        return delivery.decode(row.vectors)
    if row.state == TaskState.FAILED:
        message = row.error_detail or row.error_code
        if row.error_code == TextRefused.code:
            raise TextRefused(message)
        raise EmbeddingFailed(message, code=row.error_code)
    if row.error_code == codes.EXPIRED:
        raise TaskExpired("the embedding provider did not come to this text in time")
    raise TaskRemoved(row.error_code)
