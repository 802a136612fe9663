"""One step of embedding work, repeated: admit -> call -> on a reply free the slot and store, on failure finish.

Any number of threads, processes and machines may drain one provider: the database decides which of them dispatches. The loop
keeps the server busy: while a call is in flight it stores the reply before it, and makes the likely next call ready.

An entry point hands over `Controls`: this module can notify a run's owner of a provider timeout, and knows no circuit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial

from django.conf import settings

from embeddings import codes
from embeddings.dispatch import batches, delivery, reply_storage, task_queue, waits
from embeddings.dispatch.admission import AdmissionPolicy, policy_for
from embeddings.dispatch.calls import Call, CallEnd, Caller
from embeddings.dispatch.failures import Action, FailedCall, decide_failure
from embeddings.dispatch.reply_storage import Answered
from embeddings.dispatch.task_queue import Dispatched
from embeddings.dispatch.waits import Out, Pieces, Steps
from embeddings.errors import ProviderBusy, ProviderConfigurationError, ProviderError, SluicegateError
from embeddings.models import Provider
from embeddings.providers.base import EmbeddingProvider, RawReply
from embeddings.runtime import leases, shutdown, wake_ups
from embeddings.runtime.bulkheads import Bulkhead
from embeddings.runtime.retry import DATABASE_AWAY, retried, retry_on_database_error
from embeddings.timeouts import OnProviderTimeout, ProviderTimeoutError

logger = logging.getLogger(__name__)

BUSY_DEFAULT_MS = 1_000
# A server that answers `Retry-After: 0` would be asked ten times within a moment.
BUSY_LEAST_MS = 200
_DEPARTURE_S = 0.05


@dataclass(frozen=True)
class Controls:
    """What an entry point hands to the drain: the owner's callback for a provider timeout, and what follows a task's end.

    `goes_on` is asked before each task; `should_stop` also gives a dispatched task back, uncounted.
    """

    on_provider_timeout_for: Callable[[Dispatched], OnProviderTimeout | None]
    on_task_ended: Callable[[Dispatched], None]
    goes_on: Callable[[], bool] = lambda: True
    should_stop: Callable[[], bool] = shutdown.requested.is_set


@dataclass
class _Drain:
    """The state of one drain. `unstored` is the reply that is stored while the next call is out."""

    provider: Provider
    policy: AdmissionPolicy
    controls: Controls
    caller: Caller
    unstored: Answered | None = field(default=None)

    @property
    def goes_on(self) -> bool:
        return self.controls.goes_on() and not self.controls.should_stop()

    def out(self, call: Call) -> Out:
        return Out(call, not self.policy.slot_belongs_to_call, self.controls.should_stop)

    def note_end(self, task: Dispatched) -> None:
        retry_on_database_error(partial(self.controls.on_task_ended, task))


class _Held:
    """A dispatched task whose lease is kept from the moment of its dispatch, whatever is done before its call."""

    def __init__(self, task: Dispatched) -> None:
        self.task = task
        self.lease = contextlib.ExitStack()
        self.lease.enter_context(leases.kept(partial(task_queue.renew, task)))


def drain(provider_id: int, controls: Controls) -> int:
    """Repeats the step until nothing can be admitted. Returns how many tasks were dispatched.

    Waits for each call in this thread.
    """
    return waits.in_this_thread(_steps(provider_id, controls))


def in_pieces(provider_id: int, controls: Controls, on: Bulkhead) -> Pieces:
    """The same drain, not begun, whose calls hold no thread: what is done between them is done in the bulkhead."""
    return Pieces(_steps(provider_id, controls), on)


def _steps(provider_id: int, controls: Controls) -> Steps:
    provider = retry_on_database_error(Provider.objects.filter(pk=provider_id).first)
    if provider is None:
        return 0
    mine = _Drain(provider, policy_for(provider), controls, Caller(provider))
    dispatched = 0
    try:
        while mine.goes_on and (task := _admit(mine)):
            following: _Held | None = task
            while following is not None:
                dispatched += 1
                following = yield from _step(mine, following)
            _store_unstored(mine)
        if not mine.goes_on and task_queue.has_work(provider_id):
            # A drain that frees a slot admits the next task, or wakes another drain.
            wake_ups.notify_workers(wake_ups.DRAIN, provider_id)
    finally:
        mine.caller.drop_prefetched()
    return dispatched


def _admit(mine: _Drain) -> _Held | None:
    provider_id = mine.provider.pk
    retry_on_database_error(mine.caller.reread_provider)
    try:
        task = mine.policy.admit(mine.provider)
    except ProviderConfigurationError as error:
        # Nothing can be admitted until the row is mended: callers and outcomes get the reason instead of waiting for ever.
        for failed in task_queue.fail_queued(provider_id, error.code, str(error)):
            if failed.is_interactive:
                delivery.announce(failed.id)
            mine.note_end(failed)
        return None
    if task is None:
        return None
    held = _Held(task)
    if task_queue.wants_drain(provider_id):
        # One drain carries one call: another slot is free, so another drain is wanted.
        wake_ups.notify_workers(wake_ups.DRAIN, provider_id)
    return held


def _step(mine: _Drain, held: _Held) -> Generator[Out, CallEnd, _Held | None]:
    """Carries one dispatched task to its answer or its end; returns the task that was dispatched in its place."""
    task = held.task
    with held.lease:
        call = _start(mine, task)
        if call is None:
            mine.note_end(task)
            return None
        end = yield from _reply_to(mine, call)
        if isinstance(end, RawReply):
            return _answered(mine, call, end)
        if end is not None and (yield from _settle_failure(mine, call, end)):
            # None of its ways frees the slot of a task that was cancelled during the call.
            task_queue.release_slot(task)
            mine.note_end(task)
        return None


def _start(mine: _Drain, task: Dispatched) -> Call | None:
    """The task's call; None if there was nothing to send, or no way to: the task has ended then."""
    try:
        call = retry_on_database_error(lambda: mine.caller.start(task))
    except SluicegateError as error:
        task_queue.count_calls(task, -1)
        _fail(mine, task, error)
        return None
    if call is None:
        task_queue.count_calls(task, -1)
        task_queue.remove_held(task, codes.ROWS_GONE)
    return call


def _reply_to(mine: _Drain, call: Call) -> Generator[Out, CallEnd, CallEnd]:
    """Stores the reply before this call's and prefetches, and then lets the drain wait for its end."""
    try:
        call.left.wait(_DEPARTURE_S)
        # Before the storing, which may last as long as the call; and after it, for a lone repository's next task is only
        # queued by the end of the one before.
        _prefetch(mine)
        try:
            _store_unstored(mine)
        except DATABASE_AWAY:
            logger.exception("a reply could not be stored; its batch is embedded again")
        _prefetch(mine)
        end = yield mine.out(call)
    except BaseException:  # Whatever ends this drain, Ctrl-C too: its call must not stay at the provider.
        call.future.cancel()
        raise
    if isinstance(end, RawReply) and call.is_suspect:
        # A refusal of this text must be known while its slot is taken: the control text is sent in its place.
        try:
            call.adapter.decode(end, len(call.batch.texts), None)
        except ProviderError as error:
            return error
    return end


def _prefetch(mine: _Drain) -> None:
    """Only a guess is lost where the database is away."""
    with contextlib.suppress(*DATABASE_AWAY):
        mine.caller.reread_provider()
        mine.caller.prefetch(mine.policy.likely_next(mine.provider))


# --- a reply ------------------------------------------------------------------------------------------------------------
def _answered(mine: _Drain, call: Call, reply: RawReply) -> _Held | None:
    """Frees the slot before the reply is decoded, and dispatches the next task in the same transaction."""
    task, answered = call.task, Answered(call.task, call.batch, call.adapter, reply)
    following: _Held | None = None
    if mine.goes_on:
        is_held, dispatched = mine.policy.settle_and_admit(task)
        following = _Held(dispatched) if dispatched else None
    else:
        is_held = task_queue.settle(task)
    if is_held:
        _store_unstored(mine)
        mine.unstored = answered
    elif task_queue.release_slot(task) and mine.policy.slot_belongs_to_call and not task.is_interactive:
        # Cancelled while the call was out. A holder that lost its lease stores nothing, and has no slot to release.
        reply_storage.store_late(answered)
        mine.note_end(task)
    return following


def _store_unstored(mine: _Drain) -> None:
    answered, mine.unstored = mine.unstored, None
    if answered is None:
        return
    task = answered.task
    with leases.kept(lambda: task_queue.renew(task)):
        try:
            reply_storage.store(answered)
            _remember_format(mine.provider, answered.adapter)
        except DATABASE_AWAY:
            # The database stayed away for longer than the bound: the lease is lost, and the batch is bought again.
            raise
        except ProviderError as error:
            facts = FailedCall(task.is_interactive, len(answered.batch.texts), is_late=True)
            if decide_failure(error, facts) is Action.SPLIT:
                batches.split(task, answered.batch)
            else:
                _fail_late(task, error)
        except Exception as error:
            # Whatever else storing raises must end its own task: otherwise the batch is bought three times.
            logger.exception("embedding task %s could not be stored", task.id)
            _fail_late(task, error)
    mine.note_end(task)


@retried
def _remember_format(provider: Provider, adapter: EmbeddingProvider) -> None:
    if adapter.refuses_base64 and not provider.refuses_base64:
        Provider.objects.filter(pk=provider.pk).update(refuses_base64=True)
        provider.refuses_base64 = True


# --- a failure ----------------------------------------------------------------------------------------------------------
def _settle_failure(
    mine: _Drain, call: Call, error: ProviderError | ProviderTimeoutError
) -> Generator[Out, CallEnd, bool]:
    """Carries out what the policy decides of a failed call, whose slot is still taken. False if the drain gave it up."""
    task, batch = call.task, call.batch
    task_queue.count_calls(task, error.calls - 1)
    if task_queue.was_removed(task):
        return True
    facts = FailedCall(task.is_interactive, len(batch.texts), is_half=task.split_from_id is not None)
    action = decide_failure(error, facts)
    if action is Action.SEND_CONTROL_TEXT:
        judged = yield from _judge(mine, call, error, facts)
        if judged is None:
            return False
        error, action = judged
    if action is Action.REQUEUE:
        assert isinstance(error, ProviderBusy)  # noqa: S101  (decide_failure)
        pause_ms = _pause_ms(error)
        task_queue.requeue_busy(task, pause_ms, str(error))
        # Nothing can be admitted until then, so this drain ends: another is wanted when the time has come.
        wake_ups.notify_workers(wake_ups.DRAIN, task.provider_id, after_ms=pause_ms)
    elif action is Action.SPLIT:
        batches.split(task, batch)
    elif action is Action.MARK_UNDELIVERABLE:
        batches.mark_undeliverable(task, batch, str(error))
    else:
        _fail(mine, task, error)
    return True


def _judge(
    mine: _Drain, call: Call, error: ProviderError | ProviderTimeoutError, facts: FailedCall
) -> Generator[Out, CallEnd, tuple[ProviderError | ProviderTimeoutError, Action] | None]:
    """Finds out whether the provider takes other texts, by the control text where no half has landed, and decides anew.

    A control text that meets a busy or silent server is the error that counts. None if the drain gave the call up.
    """
    root = batches.root_id(call.task.id)
    takes_others = batches.has_landed(root)
    if not takes_others:
        control = mine.caller.send_control_text(call)
        task_queue.count_calls(call.task, 1)
        end = yield mine.out(control)
        if end is None:
            return None
        if isinstance(end, RawReply):
            try:
                call.adapter.decode(end, 1, None)
            except ProviderError as refused:
                end = refused
        task_queue.count_calls(call.task, end.calls - 1)
        if isinstance(end, ProviderBusy | ProviderTimeoutError):
            return end, decide_failure(end, facts)
        if isinstance(end, RawReply):
            _remember_format(mine.provider, call.adapter)
            takes_others = batches.note_control_passed(root)
    return error, decide_failure(error, replace(facts, takes_other_texts=takes_others))


def _fail(mine: _Drain, task: Dispatched, error: Exception) -> None:
    code = str(getattr(error, "code", None) or codes.STORE_FAILED)
    mine.policy.finish(task, error, code, mine.controls.on_provider_timeout_for(task))
    if task.is_interactive:
        delivery.announce(task.id)


def _fail_late(task: Dispatched, error: Exception) -> None:
    """The reply came: what is wrong with it, or with storing it, is no provider timeout and notifies nobody."""
    code = error.code if isinstance(error, SluicegateError) else codes.STORE_FAILED
    task_queue.fail(task, code, str(error))
    if task.is_interactive:
        delivery.announce(task.id)


def _pause_ms(error: ProviderBusy) -> int:
    wished = BUSY_DEFAULT_MS if error.retry_after_ms is None else error.retry_after_ms
    return min(max(BUSY_LEAST_MS, wished), settings.BUSY_RETRY_AFTER_MAX_MS)
