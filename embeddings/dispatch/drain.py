"""One step of embedding work, repeated: admit -> call -> on failure finish, on a reply free the slot -> store.

Any number of threads, processes and machines may drain one provider: the database decides who dispatches. The loop keeps
the server busy: it stores the previous reply, and reads the texts of the likely next task, while a call is in flight.

The contract with its door is `Controls`: this module can notify a run's owner of a provider timeout, and knows no circuit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection

from embeddings import codes
from embeddings.dispatch import batches, delivery, gates, reply_storage, task_queue
from embeddings.dispatch.batches import Batch
from embeddings.dispatch.calls import Call, GivenUp, was_removed
from embeddings.dispatch.prefetch import Prepared, prepare
from embeddings.dispatch.reply_storage import Answered
from embeddings.dispatch.task_queue import Dispatched
from embeddings.errors import ProviderBusy, ProviderConfigurationError, ProviderError, SluicegateError, TextRefused
from embeddings.models import EmbeddingGeneration, EmbeddingTask, Provider
from embeddings.providers import adapter_for
from embeddings.providers.base import EmbeddingCall, EmbeddingProvider, RawReply
from embeddings.runtime import leases, shutdown, wake_ups
from embeddings.runtime.retry import durably
from embeddings.timeouts import OnProviderTimeout, ProviderTimeoutError
from project.runtime import event_loop

logger = logging.getLogger(__name__)

CONTROL_TEXT = "A plain sentence that every embedding model takes."
BUSY_DEFAULT_MS = 1_000
# A server that asks for no patience at all would be asked ten times within a breath.
BUSY_LEAST_MS = 200
_LOOK_FIRST_S, _LOOK_EVERY_S = 0.25, 1.0
_DEPARTURE_S = 0.05


@dataclass(frozen=True)
class Controls:
    """What a door hands to the drain: who hears of a provider timeout, and who of a task's end.

    `goes_on` is asked before each task; `should_stop` also gives a dispatched task back, uncounted.
    """

    on_provider_timeout_for: Callable[[Dispatched], OnProviderTimeout | None]
    on_task_ended: Callable[[Dispatched], None]
    goes_on: Callable[[], bool] = lambda: True
    should_stop: Callable[[], bool] = shutdown.requested.is_set


def drain(provider_id: int, controls: Controls) -> int:
    """Repeats the step until nothing can be admitted. Returns how many tasks were dispatched."""
    provider = Provider.objects.filter(pk=provider_id).first()
    return _Drain(provider, controls).run() if provider else 0


@dataclass
class _Drain:
    provider: Provider
    controls: Controls
    gate: gates.Gate = field(init=False)
    unstored: Answered | None = None
    prepared: Prepared | None = None
    models: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = gates.gate_for(self.provider)

    def run(self) -> int:
        try:
            return self._run()
        finally:
            self._drop_prepared()

    def _run(self) -> int:
        dispatched = 0
        while self._goes_on() and (task := self._admit()):
            following: Dispatched | None = task
            while following is not None:
                dispatched += 1
                following = self._step(following)
            self._store_unstored()
        if not self._goes_on() and task_queue.has_work(self.provider.pk):
            # Whoever frees a slot admits the next task or rings.
            wake_ups.ring(wake_ups.DRAIN, self.provider.pk)
        return dispatched

    def _goes_on(self) -> bool:
        return self.controls.goes_on() and not self.controls.should_stop()

    def _admit(self) -> Dispatched | None:
        self._reread()
        try:
            task = self.gate.admit(self.provider)
        except ProviderConfigurationError as error:
            self._fail_queued(error)
            return None
        if task is not None and task_queue.stands_idle(self.provider.pk):
            # One drain carries one call: where the gate would let another through, another drain is wanted.
            wake_ups.ring(wake_ups.DRAIN, self.provider.pk)
        return task

    def _fail_queued(self, error: ProviderConfigurationError) -> None:
        """Nothing can be admitted until someone mends the row: what waits hears so by name, rather than for ever."""
        for task in task_queue.fail_queued(self.provider.pk, error.code, str(error)):
            if task.is_interactive:
                delivery.announce(task.id)
            self._ended(task)

    def _ended(self, task: Dispatched) -> None:
        durably(partial(self.controls.on_task_ended, task))

    def _reread(self) -> None:
        """Takes up a configuration that was changed since."""
        revision = Provider.objects.values_list("revision", flat=True).filter(pk=self.provider.pk).first()
        if revision is not None and revision != self.provider.revision:
            self.provider.refresh_from_db()
            self._drop_prepared()

    def _step(self, task: Dispatched) -> Dispatched | None:
        """Carries one dispatched task to its answer or its end; returns the task that was dispatched in its place."""
        with leases.kept(lambda: task_queue.renew(task)):
            call = self._start(task)
            if call is None:
                self._ended(task)
                return None
            try:
                reply = self._reply_to(call)
            except GivenUp:
                return None
            except (ProviderError, ProviderTimeoutError) as error:
                self._failed(call, error)
                return None
            return self._answered(call, reply)

    def _reply_to(self, call: Call) -> RawReply:
        """Waits for the reply, and does meanwhile what the call before it left to do."""
        try:
            call.left.wait(_DEPARTURE_S)
            # Before the storing, which may last as long as the call, and after it: only then does a lone repository's
            # next task stand queued.
            self._prepare_next()
            self._store_unstored()
            self._prepare_next()
            reply = self._wait(call)
        except BaseException:
            call.future.cancel()
            raise
        if call.is_suspect:
            # A refusal of a suspect text must be heard while its slot is taken: the control text goes in its place.
            call.adapter.decode(reply, len(call.batch.texts), None)
        return reply

    # --- calling ---------------------------------------------------------------------------------------------------
    def _start(self, task: Dispatched) -> Call | None:
        """Sends the task's texts; None if there was nothing to send, or no way to: the task has ended then."""
        if call := self._release_prepared(task):
            return call
        batch = self._batch_of(task)
        try:
            adapter = adapter_for(self.provider)
        except SluicegateError as error:
            task_queue.count_calls(task, -1)
            self._fail(task, error)
            return None
        if not batch.texts:
            task_queue.count_calls(task, -1)
            task_queue.remove_held(task, codes.ROWS_GONE)
            return None
        return self._send(task, batch, adapter, is_control=False)

    def _send(self, task: Dispatched, batch: Batch, adapter: EmbeddingProvider, *, is_control: bool) -> Call:
        call = EmbeddingCall(
            texts=batch.texts,
            model=self._model_of(task),
            is_interactive=task.is_interactive,
            deadline_s=self._deadline_s(task.is_interactive),
            left=Event(),
            may_test_format=is_control or task.is_interactive,
        )
        return Call(task, batch, adapter, event_loop.submit(adapter.embed(call)), call.left)

    def _batch_of(self, task: Dispatched) -> Batch:
        if task.is_interactive:
            texts = EmbeddingTask.objects.values_list("texts", flat=True).get(pk=task.id)
            return Batch(tuple(texts or ()), ())
        return batches.load(task.id)

    def _deadline_s(self, is_interactive: bool) -> float:
        provider = self.provider
        deadline_ms = provider.query_timeout_ms if is_interactive else provider.embedding_timeout_ms
        return max(1.0, deadline_ms / 1000)

    def _model_of(self, task: Dispatched) -> str:
        """The generation's own model: the provider's present one may be another by now."""
        found = self.models.get(task.generation_id)
        if found is None:
            found = EmbeddingGeneration.objects.values_list("model", flat=True).get(pk=task.generation_id)
            self.models[task.generation_id] = found
        return found

    def _prepare_next(self) -> None:
        """A guess: the call of the task that will most likely be next is made ready while the server is at work."""
        self._reread()
        task_id = self.gate.likely_next(self.provider)
        if self.prepared is not None and self.prepared.task_id == task_id:
            return
        self._drop_prepared()
        batch = batches.load(task_id) if task_id else None
        if not task_id or not batch or not batch.texts:
            return
        call = EmbeddingCall(
            texts=batch.texts,
            model=self.provider.embedding_model,
            is_interactive=False,
            deadline_s=self._deadline_s(is_interactive=False),
            left=Event(),
            held=asyncio.Event(),
        )
        with contextlib.suppress(SluicegateError):  # whoever dispatches the task hears it
            self.prepared = prepare(task_id, batch, adapter_for(self.provider), call)

    def _release_prepared(self, task: Dispatched) -> Call | None:
        """The prepared call, let go, if it is this task's and still what would be sent."""
        found, self.prepared = self.prepared, None
        if found is None:
            return None
        if found.task_id != task.id or found.call.model != self._model_of(task) or found.future.done():
            found.drop()
            return None
        found.release()
        return Call(task, found.batch, found.adapter, found.future, found.call.left)

    def _drop_prepared(self) -> None:
        if self.prepared is not None:
            self.prepared.drop()
            self.prepared = None

    def _wait(self, call: Call) -> RawReply:
        """Waits for the reply, looking now and then whether the task was cancelled or the worker is to stop."""
        look_s = _LOOK_FIRST_S
        if call.task.is_interactive:
            _let_connection_go()
        while not call.future.done():
            concurrent.futures.wait([call.future], timeout=look_s)
            if call.future.done():
                break
            if self.controls.should_stop():
                call.future.cancel()
                # The call has ended with its slot, also where the task was removed before.
                if not task_queue.give_back(call.task):
                    task_queue.release_slot(call.task)
                raise GivenUp
            if self.gate.cancels_calls and was_removed(call.task):
                call.future.cancel()
                task_queue.release_slot(call.task)
                raise GivenUp
            _let_connection_go()
            # Somebody waits for an interactive call, and may give it up.
            look_s = _LOOK_FIRST_S if call.task.is_interactive else min(2 * look_s, _LOOK_EVERY_S)
        return call.result()

    # --- a reply -----------------------------------------------------------------------------------------------------
    def _answered(self, call: Call, reply: RawReply) -> Dispatched | None:
        """Frees the slot before the reply is decoded, and dispatches the next task in the same transaction."""
        if self._goes_on():
            held, following = durably(lambda: self.gate.settle_and_admit(self.provider, call.task))
        else:
            held, following = task_queue.settle(call.task), None
        if held:
            self._store_unstored()
            self.unstored = Answered(call.task, call.batch, call.adapter, reply)
        else:
            self._late(call, reply)
        return following

    def _late(self, call: Call, reply: RawReply) -> None:
        """The task was cancelled or lost while the call was out. Its slot comes free; of a fenced holder nothing is kept."""
        kept = self.gate.keeps_late_replies and not call.task.is_interactive
        if task_queue.release_slot(call.task) and kept:
            reply_storage.keep_late(Answered(call.task, call.batch, call.adapter, reply))
            self._ended(call.task)

    def _store_unstored(self) -> None:
        answered, self.unstored = self.unstored, None
        if answered is None:
            return
        with leases.kept(lambda: task_queue.renew(answered.task)):
            try:
                reply_storage.keep(answered)
                self._remember_format(answered.adapter)
            except TextRefused as error:
                self._refused_late(answered, error)
            except (OperationalError, InterfaceError):
                # The database stayed away for longer than the bound: the lease is lost and the batch bought again.
                raise
            except Exception as error:
                # Whatever else storing raises ends its own task: left alone, the batch would be bought three times.
                logger.exception("embedding task %s could not be stored", answered.task.id)
                self._fail_late(answered.task, error)
        self._ended(answered.task)

    def _remember_format(self, adapter: EmbeddingProvider) -> None:
        if adapter.refuses_base64 and not self.provider.refuses_base64:
            Provider.objects.filter(pk=self.provider.pk).update(refuses_base64=True)
            self.provider.refuses_base64 = True

    # --- a failure ---------------------------------------------------------------------------------------------------
    def _failed(self, call: Call, error: ProviderError | ProviderTimeoutError) -> None:
        """One failed call: a batch may go back, be split, or fail for good. The slot never passes straight on."""
        try:
            self._settle_failure(call, error)
        except GivenUp:
            return
        # Where the task was cancelled meanwhile, its slot went with none of these.
        task_queue.release_slot(call.task)
        self._ended(call.task)

    def _settle_failure(self, call: Call, error: ProviderError | ProviderTimeoutError) -> None:
        task = call.task
        task_queue.count_calls(task, error.calls - 1)
        if was_removed(task):
            return
        if isinstance(error, ProviderBusy) and not task.is_interactive:
            patience_ms = _patience_ms(error)
            task_queue.requeue_busy(task, patience_ms, str(error))
            # Nothing can be admitted until then, so this drain ends: another is wanted when the time has come.
            wake_ups.ring(wake_ups.DRAIN, task.provider_id, after_ms=patience_ms)
        elif isinstance(error, TextRefused) and not task.is_interactive:
            self._refused(call, error)
        else:
            self._fail(task, error)

    def _refused(self, call: Call, error: TextRefused) -> None:
        """Isolates the refused text, and condemns it only if the provider takes some other text."""
        task, batch = call.task, call.batch
        root = batches.root_id(task.id)
        if len(batch.texts) > 1 and root == task.id:
            batches.split(task, batch)
            return
        try:
            is_texts_own = batches.has_landed(root) or self._control_lands(call, root)
        except (ProviderBusy, ProviderTimeoutError) as instead:
            # The server's state, not the text, is what this task ends with.
            self._settle_failure(call, instead)
            return
        if not is_texts_own:
            self._fail(task, error)
        elif len(batch.texts) > 1:
            batches.split(task, batch)
        else:
            batches.condemn(task, batch, str(error))

    def _refused_late(self, answered: Answered, error: TextRefused) -> None:
        """A whole batch whose reply was refused once its slot was free: it is split, as after any refusal."""
        if answered.task.is_interactive or len(answered.batch.texts) == 1:
            self._fail_late(answered.task, error)
        else:
            batches.split(answered.task, answered.batch)

    def _control_lands(self, call: Call, root: int) -> bool:
        """Whether the provider takes the control text. Sent in the refused call's place, while its slot is still taken.

        Raises ProviderBusy or ProviderTimeoutError where the server says nothing about texts at all.
        """
        control = self._send(call.task, Batch((CONTROL_TEXT,), ((),)), call.adapter, is_control=True)
        task_queue.count_calls(call.task, 1)
        try:
            reply = self._wait(control)
            call.adapter.decode(reply, 1, None)
        except ProviderBusy:
            raise
        except ProviderError as error:
            task_queue.count_calls(call.task, error.calls - 1)
            return False
        self._remember_format(call.adapter)
        task_queue.count_calls(call.task, reply.calls - 1)
        return EmbeddingTask.objects.filter(pk=root).update(control_passed=True) == 1

    def _fail(self, task: Dispatched, error: Exception) -> None:
        code = getattr(error, "code", None) or codes.STORE_FAILED
        if self.gate.finish is None:
            task_queue.fail(task, str(code), str(error))
        else:
            self.gate.finish(task, error, str(code), self.controls.on_provider_timeout_for(task))
        if task.is_interactive:
            delivery.announce(task.id)

    def _fail_late(self, task: Dispatched, error: Exception) -> None:
        """The reply came: whatever is wrong with it, or with storing it, is no provider timeout and notifies nobody."""
        code = error.code if isinstance(error, SluicegateError) else codes.STORE_FAILED
        task_queue.fail(task, code, str(error))
        if task.is_interactive:
            delivery.announce(task.id)


def _let_connection_go() -> None:
    """A call may last for minutes, callers are many, and PostgreSQL's connections few."""
    if not connection.in_atomic_block:
        connection.close()


def _patience_ms(error: ProviderBusy) -> int:
    wished = BUSY_DEFAULT_MS if error.retry_after_ms is None else error.retry_after_ms
    return min(max(BUSY_LEAST_MS, wished), settings.BUSY_RETRY_AFTER_MAX_MS)
