"""The embedding calls of one drain: sent for a task, or made ready ahead of its dispatch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from dataclasses import dataclass
from threading import Event

from embeddings.dispatch import batches
from embeddings.dispatch.batches import Batch
from embeddings.dispatch.task_queue import Dispatched
from embeddings.errors import ProviderError, SluicegateError
from embeddings.models import EmbeddingGeneration, EmbeddingTask, Provider
from embeddings.providers import adapter_for
from embeddings.providers.base import EmbeddingCall, EmbeddingProvider, RawReply
from embeddings.timeouts import ProviderTimeoutError
from project.runtime import event_loop

logger = logging.getLogger(__name__)

CONTROL_TEXT = "A plain sentence that every embedding model takes."

# How a call ended; None: it was given up on purpose, and its task's row holds the reason.
CallEnd = RawReply | ProviderError | ProviderTimeoutError | None


@dataclass(frozen=True)
class Call:
    """A dispatched task's call; `left` is set once its request is out, `future` ends with the reply or a typed error."""

    task: Dispatched
    batch: Batch
    adapter: EmbeddingProvider
    future: concurrent.futures.Future[RawReply]
    left: Event

    @property
    def is_suspect(self) -> bool:
        """Whether a refusal could mark a text undeliverable: a half of a refused batch, or a batch of one text."""
        is_alone = len(self.batch.texts) == 1
        return not self.task.is_interactive and (is_alone or self.task.split_from_id is not None)

    def end(self) -> CallEnd:
        """How the call, which is over, ended."""
        try:
            return self.future.result()
        except (ProviderError, ProviderTimeoutError) as error:
            return error
        except Exception as error:
            # Whatever else the client raises for these texts must end their task: otherwise it is tried for ever.
            logger.exception("embedding task %s: the call could not be made", self.task.id)
            failure = ProviderError(f"the call could not be made: {type(error).__name__}")
            failure.__cause__ = error
            return failure


@dataclass(frozen=True)
class Prefetched:
    """The call of a task that is not dispatched yet: built, and held before the wire."""

    task_id: int
    batch: Batch
    adapter: EmbeddingProvider
    call: EmbeddingCall
    held: asyncio.Event
    future: concurrent.futures.Future[RawReply]


class Caller:
    """Makes the calls of one drain.

    While one call is out, the likely next one is made ready up to the wire (`prefetch`): building a request takes longer than
    admitting its task. A wrong guess is dropped, and nothing of it is ever sent.
    """

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self._prefetched: Prefetched | None = None
        self._models: dict[int, str] = {}

    def reread_provider(self) -> None:
        """Takes up a configuration that has changed since."""
        revision = Provider.objects.values_list("revision", flat=True).filter(pk=self.provider.pk).first()
        if revision is not None and revision != self.provider.revision:
            self.provider.refresh_from_db()
            self.drop_prefetched()

    def start(self, task: Dispatched) -> Call | None:
        """Sends the task's texts; None if there are none left to send. Raises SluicegateError where no call can be made."""
        if call := self._release_prefetched(task):
            return call
        if task.is_interactive:
            texts = EmbeddingTask.objects.values_list("texts", flat=True).get(pk=task.id)
            batch = Batch(tuple(texts or ()), ())
        else:
            batch = batches.load(task.id)
        adapter = adapter_for(self.provider)
        return self._send(task, batch, adapter, may_test_format=task.is_interactive) if batch.texts else None

    def send_control_text(self, refused: Call) -> Call:
        """Sends a text that every model takes, in the refused call's place."""
        return self._send(refused.task, Batch((CONTROL_TEXT,), ((),)), refused.adapter, may_test_format=True)

    def _send(self, task: Dispatched, batch: Batch, adapter: EmbeddingProvider, *, may_test_format: bool) -> Call:
        call = EmbeddingCall(
            texts=batch.texts,
            model=self._model_of(task),
            is_interactive=task.is_interactive,
            deadline_s=self._deadline_s(task.is_interactive),
            left=Event(),
            may_test_format=may_test_format,
        )
        return Call(task, batch, adapter, event_loop.submit(adapter.embed(call)), call.left)

    def prefetch(self, task_id: int | None) -> None:
        """Makes the call of this queued task ready; drops what was ready for another."""
        if self._prefetched is not None and self._prefetched.task_id == task_id:
            return
        self.drop_prefetched()
        batch = batches.load(task_id) if task_id else None
        if not task_id or not batch or not batch.texts:
            return
        held = asyncio.Event()
        call = EmbeddingCall(
            texts=batch.texts,
            model=self.provider.embedding_model,
            is_interactive=False,
            deadline_s=self._deadline_s(is_interactive=False),
            left=Event(),
            held=held,
        )
        with contextlib.suppress(SluicegateError):  # `start` raises it for the task
            adapter = adapter_for(self.provider)
            future = event_loop.submit(adapter.embed(call))
            self._prefetched = Prefetched(task_id, batch, adapter, call, held, future)

    def drop_prefetched(self) -> None:
        if self._prefetched is not None:
            self._prefetched.future.cancel()
            self._prefetched = None

    def _release_prefetched(self, task: Dispatched) -> Call | None:
        """Lets the prefetched call go, its deadline from now, if it is this task's and still what would be sent."""
        ready = self._prefetched
        if ready is None:
            return None
        if ready.task_id != task.id or ready.call.model != self._model_of(task) or ready.future.done():
            self.drop_prefetched()
            return None
        self._prefetched = None
        event_loop.loop().call_soon_threadsafe(ready.held.set)
        return Call(task, ready.batch, ready.adapter, ready.future, ready.call.left)

    def _model_of(self, task: Dispatched) -> str:
        """The generation's own model: the provider's present one may be another by now."""
        model = self._models.get(task.generation_id)
        if model is None:
            model = EmbeddingGeneration.objects.values_list("model", flat=True).get(pk=task.generation_id)
            self._models[task.generation_id] = model
        return model

    def _deadline_s(self, is_interactive: bool) -> float:
        deadline_ms = self.provider.query_timeout_ms if is_interactive else self.provider.embedding_timeout_ms
        return max(1.0, deadline_ms / 1000)
