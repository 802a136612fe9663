"""The next call made ready while the one before it is out, up to the wire and no further (docs/architecture.md, Embedding).

Building a request takes longer than admitting its task. A wrong guess is dropped; nobody but this process ever knew of it.
"""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass

from embeddings.dispatch.batches import Batch
from embeddings.providers.base import EmbeddingCall, EmbeddingProvider, RawReply
from project.runtime import event_loop


@dataclass(frozen=True)
class Prepared:
    """A call that is held before the wire for the task `task_id`, until that task is dispatched."""

    task_id: int
    batch: Batch
    adapter: EmbeddingProvider
    call: EmbeddingCall
    future: concurrent.futures.Future[RawReply]

    def release(self) -> None:
        """The task was dispatched: the request leaves, its deadline runs from now."""
        assert self.call.held is not None  # noqa: S101  (prepare)
        event_loop.loop().call_soon_threadsafe(self.call.held.set)

    def drop(self) -> None:
        """Another task, or none, was dispatched: nothing was sent."""
        self.future.cancel()


def prepare(task_id: int, batch: Batch, adapter: EmbeddingProvider, call: EmbeddingCall) -> Prepared:
    """Starts the call, which must be `held`."""
    if call.held is None:
        raise ValueError("a call that nothing holds would leave before its task is dispatched")
    return Prepared(task_id, batch, adapter, call, event_loop.submit(adapter.embed(call)))
