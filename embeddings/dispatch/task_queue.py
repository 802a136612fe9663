"""Durable embedding tasks: put, admit, settle, requeue, reclaim, remove (docs/architecture.md, Embedding).

Locks are taken in one order everywhere: provider, run, outcome, task. Putting and opening a circuit lock the run and
never the provider. Every way into `queued` reads the run's `dispatch_allowed` in the same transaction, under its lock.
The statements stand in `task_statements`, and run from here alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from embeddings import codes
from embeddings.dispatch import task_statements as sql
from embeddings.errors import DispatchNotAllowed, ProviderConfigurationError
from embeddings.models import EmbeddingTask
from embeddings.states import TASK_UNSETTLED, TaskPriority, TaskState

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from embeddings.models import EmbeddingGeneration, Provider, RepositoryOutcome

LOSSES_MAX = 3
Order = Literal["fair", "fifo"]
# From the cap as the locked row holds it to how many tasks may be at the provider (None: any number).
Slots = Callable[[object], int | None]


@dataclass(frozen=True)
class Dispatched:
    """A task whose HTTP request may leave, held by `token` until it is settled or its lease is lost."""

    id: int
    token: str
    provider_id: int
    generation_id: int
    priority: int
    run_id: int | None
    outcome_id: int | None
    split_from_id: int | None = None

    @property
    def is_interactive(self) -> bool:
        return self.priority == TaskPriority.INTERACTIVE

    @property
    def of_outcome(self) -> int:
        """The outcome of a batch task; an interactive one has none."""
        assert self.outcome_id is not None  # noqa: S101
        return self.outcome_id


# --- putting --------------------------------------------------------------------------------------------------------
def put_batch(outcome: RepositoryOutcome, text_count: int, split_from_id: int | None = None) -> EmbeddingTask:
    """Queues a batch task of the outcome. The caller holds the run's lock and binds its rows in the same transaction.

    Raises DispatchNotAllowed if the run's circuit is open or it was cancelled.
    """
    run = lock_run(outcome.run_id)
    if not run.dispatch_allowed:
        raise DispatchNotAllowed
    return EmbeddingTask.objects.create(
        provider_id=run.provider_id,
        generation_id=run.generation_id,
        priority=TaskPriority.BATCH,
        run_id=outcome.run_id,
        outcome=outcome,
        text_count=text_count,
        split_from_id=split_from_id,
    )


def put_interactive(
    provider: Provider, generation: EmbeddingGeneration, texts: Sequence[str], patience_ms: int
) -> EmbeddingTask:
    """Queues the texts of one interactive caller; undispatched after `patience_ms`, the task is removed."""
    return EmbeddingTask.objects.create(
        provider=provider,
        generation=generation,
        priority=TaskPriority.INTERACTIVE,
        texts=list(texts),
        text_count=len(texts),
        expires_at=timezone.now() + timedelta(milliseconds=patience_ms),
    )


def lock_provider(provider_id: int) -> None:
    """Locks the provider before the run, where dispatched tasks are to be ended: an admission holds it, and tasks."""
    with connection.cursor() as cursor:
        _lock_provider(cursor, provider_id)


@dataclass(frozen=True)
class LockedRun:
    provider_id: int
    generation_id: int
    dispatch_allowed: bool


def lock_run(run_id: int) -> LockedRun:
    """Locks the run for the rest of the transaction and reads what a put needs."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT provider_id, generation_id, dispatch_allowed FROM embeddings_tenantrun WHERE id = %s {sql.lock()}",
            [run_id],
        )
        provider_id, generation_id, allowed = cursor.fetchone()
    return LockedRun(provider_id, generation_id, bool(allowed))


# --- admitting ------------------------------------------------------------------------------------------------------
def admit(provider_id: int, slots: Slots, order: Order) -> Dispatched | None:
    """Reclaims lost leases and dispatches the next task, if a slot is free: one transaction under the provider's lock.

    `slots` judges the provider's cap, read anew each time, and may raise ProviderConfigurationError. `fair`: the outcome
    least recently dispatched first; `fifo`: as they were put. Interactive tasks go first, but a batch that has been
    overtaken for `LANE_BATCH_MAX_WAIT_MS` goes next.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        return _admit(cursor, provider_id, slots, order)


def settle_and_admit(task: Dispatched, slots: Slots, order: Order) -> tuple[bool, Dispatched | None]:
    """A reply came: the task is answered, its slot free, and the next task dispatched, in one transaction.

    Says whether the task was still held; the lease is renewed and kept until the vectors are stored.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        gate = _lock_provider(cursor, task.provider_id, sql.LOCK_TO_ADMIT)
        held = sql.execute(cursor, sql.SETTLE, answered=TaskState.ANSWERED, **_holder(task)) == 1
        try:
            # Without reclaiming: that locks runs, which come before the task that is locked by now.
            return held, _pick_and_dispatch(cursor, gate, slots, order)
        except ProviderConfigurationError:
            # The reply counts whatever the cap is by now; the next admission says what is wrong with it.
            return held, None


def _admit(cursor: CursorWrapper, provider_id: int, slots: Slots, order: Order) -> Dispatched | None:
    gate = _lock_provider(cursor, provider_id, sql.LOCK_TO_ADMIT)
    if gate is not None:
        _reclaim(cursor, provider_id)
    return _pick_and_dispatch(cursor, gate, slots, order)


def _pick_and_dispatch(cursor: CursorWrapper, gate: _Gate | None, slots: Slots, order: Order) -> Dispatched | None:
    if gate is None or gate.is_paused:
        return None
    free = _free_slot(cursor, gate.provider_id, slots(gate.cap))
    if free is _NO_SLOT:
        return None
    while picked := _pick(cursor, gate, order):
        if dispatched := _dispatch(cursor, gate, picked, free):
            return dispatched
    return None


@dataclass(frozen=True)
class _Gate:
    provider_id: int
    is_paused: bool
    is_busy: bool
    batch_is_due: bool
    was_overtaken: bool
    cap: object


_NO_SLOT = object()


def _lock_provider(cursor: CursorWrapper, provider_id: int, statement: str | None = None) -> _Gate | None:
    # A statement of its own: folded into the pick, PostgreSQL would go on with the snapshot from before the wait.
    sql.execute(cursor, statement or sql.LOCK_PROVIDER, provider=provider_id)
    row = cursor.fetchone()
    if row is None:
        return None
    return _Gate(provider_id, bool(row[0]), bool(row[1]), bool(row[2]), bool(row[3]), cap=row[4])


def _free_slot(cursor: CursorWrapper, provider_id: int, slots: int | None) -> Any:
    if slots is None:
        return None
    sql.execute(cursor, sql.TAKEN_SLOTS, provider=provider_id)
    taken = {row[0] for row in cursor.fetchall()}
    # The cap bounds how many are out, also when it was lowered while higher slots are taken.
    if len(taken) >= slots:
        return _NO_SLOT
    return next(slot for slot in range(slots) if slot not in taken)


def _pick(cursor: CursorWrapper, gate: _Gate, order: Order) -> tuple[Any, ...] | None:
    statement = sql.PICK[order, gate.batch_is_due]
    sql.execute(cursor, statement, provider=gate.provider_id, batch_least=0 if gate.is_busy else TaskPriority.BATCH)
    return cursor.fetchone()  # type: ignore[no-any-return]


def _dispatch(cursor: CursorWrapper, gate: _Gate, picked: tuple[Any, ...], slot: int | None) -> Dispatched | None:
    """Dispatches the picked task unless it was removed since; None then."""
    task = Dispatched(picked[0], secrets.token_hex(16), gate.provider_id, *picked[1:])
    if task.outcome_id is not None:
        # The outcome before the task: an opening circuit locks them in that order.
        sql.execute(
            cursor, sql.COUNT_DISPATCH, outcome=task.outcome_id, instant=f"{timezone.now():%Y-%m-%d %H:%M:%S.%f}"
        )
    if sql.execute(cursor, sql.DISPATCH, slot=slot, **_holder(task)) == 0:
        count_calls(task, -1)
        return None
    _note_overtaking(cursor, gate, task)
    return task


def _note_overtaking(cursor: CursorWrapper, gate: _Gate, task: Dispatched) -> None:
    """Counts from the first overtaking, not from when the batch was queued: a long backlog is not a long overtaking."""
    if task.is_interactive:
        sql.execute(cursor, sql.OVERTAKING, provider=gate.provider_id)
    elif gate.was_overtaken:
        sql.execute(cursor, sql.NOT_OVERTAKEN, provider=gate.provider_id)


def peek(provider_id: int, order: Order) -> int | None:
    """The id of the task that would most likely be admitted next, without a lock: a guess to prepare for."""
    with connection.cursor() as cursor:
        sql.execute(cursor, sql.PICK[order, False], provider=provider_id, batch_least=TaskPriority.BATCH)
        row = cursor.fetchone()
    return row[0] if row else None


def has_work(provider_id: int) -> bool:
    """Whether a task stands queued, or a lost lease waits to be reclaimed: someone should drain."""
    with connection.cursor() as cursor:
        sql.execute(cursor, sql.HAS_WORK, provider=provider_id)
        return cursor.fetchone() is not None


def stands_idle(provider_id: int) -> bool:
    """Whether a task that could be admitted now stands queued, or a lost lease waits: nobody is at work on them."""
    with connection.cursor() as cursor:
        sql.execute(cursor, sql.STANDS_IDLE, provider=provider_id)
        return cursor.fetchone() is not None


def providers_with_work() -> list[int]:
    """The providers at which work lies idle."""
    unsettled = EmbeddingTask.objects.filter(Q(state__in=TASK_UNSETTLED) | Q(slot__isnull=False))
    return [pk for pk in unsettled.values_list("provider", flat=True).distinct() if stands_idle(pk)]


# --- the holder's verbs: each matches no row once the token is gone ----------------------------------------------------
def is_held(task: Dispatched) -> bool:
    return EmbeddingTask.objects.filter(
        pk=task.id, dispatch_token=task.token, state__in=(TaskState.DISPATCHED, TaskState.ANSWERED)
    ).exists()


def renew(task: Dispatched) -> bool:
    """Renews the lease, also of a removed task whose call is still out; False once the holder is fenced off."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.RENEW, **_holder(task)) == 1


def fail(task: Dispatched, code: str, detail: str) -> bool:
    """The task's final failure: settled, its slot free."""
    return _end(task, TaskState.FAILED, code, detail, ended_by="error")


def remove_held(task: Dispatched, reason: str, detail: str = "") -> bool:
    """The holder gives the task up for good: removed with its reason, its slot free."""
    return _end(task, TaskState.REMOVED, reason, detail, ended_by="cancel")


def release_slot(task: Dispatched) -> bool:
    """The call of a task that was removed meanwhile has ended: its slot is free now."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.RELEASE_SLOT, **_holder(task)) == 1


def settle(task: Dispatched) -> bool:
    """A reply came and nothing is admitted in its place: answered, slot free, lease renewed until stored."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.SETTLE, answered=TaskState.ANSWERED, **_holder(task)) == 1


def mark_stored(task: Dispatched) -> bool:
    """The last step of storing, in its transaction."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.STORED, **_holder(task)) == 1


def count_calls(task: Dispatched, further: int) -> None:
    """Corrects the outcome's count of HTTP requests, one a dispatch: more for retries, fewer if none left."""
    if further and task.outcome_id is not None:
        with connection.cursor() as cursor:
            sql.execute(cursor, sql.COUNT_CALLS, outcome=task.outcome_id, further=further)


def requeue_busy(task: Dispatched, retry_after_ms: int, detail: str) -> TaskState | None:
    """The provider asked for patience: the batch goes back, and the provider takes no batch until then.

    Too often or for too long, the task fails as busy; a run that no longer dispatches gets it removed. Returns the new
    state, None if the task is no longer held.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        _lock_provider(cursor, task.provider_id)
        sql.execute(cursor, sql.PROVIDER_BUSY, ahead_ms=retry_after_ms, provider=task.provider_id)
        allowed = task.run_id is None or lock_run(task.run_id).dispatch_allowed
        if not allowed:
            return TaskState.REMOVED if remove_held(task, codes.DISPATCH_STOPPED) else None
        row = EmbeddingTask.objects.get(pk=task.id)
        if _busy_for_too_long(row):
            return TaskState.FAILED if fail(task, codes.PROVIDER_BUSY, detail) else None
        return TaskState.QUEUED if sql.execute(cursor, sql.REQUEUE_BUSY, **_holder(task)) == 1 else None


def _busy_for_too_long(row: EmbeddingTask) -> bool:
    if row.busy_requeues >= settings.BUSY_REQUEUES_MAX:
        return True
    return row.busy_since is not None and timezone.now() - row.busy_since > timedelta(
        milliseconds=settings.BUSY_TOTAL_MAX_MS
    )


def give_back(task: Dispatched) -> bool:
    """A worker that shuts down returns its task uncounted; a run that no longer dispatches gets it removed."""
    with transaction.atomic(), connection.cursor() as cursor:
        if task.run_id is not None and not lock_run(task.run_id).dispatch_allowed:
            return remove_held(task, codes.DISPATCH_STOPPED)
        return sql.execute(cursor, sql.GIVE_BACK, **_holder(task)) == 1


def _end(task: Dispatched, state: TaskState, code: str, detail: str, ended_by: str) -> bool:
    with connection.cursor() as cursor:
        ended = sql.execute(
            cursor, sql.END, state=state, code=code, detail=detail[:1000], ended_by=ended_by, **_holder(task)
        )
    return ended == 1


# --- reclaiming and removing ------------------------------------------------------------------------------------------
def _reclaim(cursor: CursorWrapper, provider_id: int) -> None:
    """Lost leases go back to the queue if their run still dispatches; the third loss fails; expired ones go."""
    sql.execute(cursor, sql.EXPIRE, provider=provider_id, reason=codes.EXPIRED)
    sql.execute(cursor, sql.FREE_ABANDONED_SLOTS, provider=provider_id)
    sql.execute(cursor, sql.LOST, provider=provider_id)
    for task_id, run_id, losses in cursor.fetchall():
        allowed = run_id is None or lock_run(run_id).dispatch_allowed
        if not allowed:
            sql.execute(cursor, sql.LOSE_TO_END, task=task_id, state=TaskState.REMOVED, code=codes.DISPATCH_STOPPED)
        elif losses + 1 >= LOSSES_MAX:
            sql.execute(cursor, sql.LOSE_TO_END, task=task_id, state=TaskState.FAILED, code=codes.TASK_LOST)
        else:
            sql.execute(cursor, sql.LOSE_TO_QUEUE, task=task_id)


def reclaim(provider_id: int) -> None:
    """Reclaims the provider's lost leases without admitting anything."""
    with transaction.atomic(), connection.cursor() as cursor:
        if _lock_provider(cursor, provider_id):
            _reclaim(cursor, provider_id)


def fail_queued(provider_id: int, code: str, detail: str) -> list[Dispatched]:
    """Fails everything that waits at a provider whose configuration admits nothing; returns what it was."""
    with transaction.atomic(), connection.cursor() as cursor:
        _lock_provider(cursor, provider_id)
        queued = list(EmbeddingTask.objects.filter(provider=provider_id, state=TaskState.QUEUED).order_by("pk"))
        failed = []
        for row in queued:
            if sql.execute(cursor, sql.FAIL_QUEUED, task=row.pk, code=code, detail=detail[:1000]) == 1:
                failed.append(
                    Dispatched(row.pk, "", provider_id, row.generation_id, row.priority, row.run_id, row.outcome_id)
                )
    return failed


def remove_queued(reason: str, **where: Any) -> int:
    """Removes the queued tasks that match; the caller holds their run's lock. Returns how many."""
    return EmbeddingTask.objects.filter(state=TaskState.QUEUED, **where).update(
        state=TaskState.REMOVED, error_code=reason, settled_at=timezone.now()
    )


def cancel_dispatched(reason: str, **where: Any) -> int:
    """Removes dispatched tasks for their callers; the slot stays until the call has ended, or its lease is lost."""
    return EmbeddingTask.objects.filter(state=TaskState.DISPATCHED, **where).update(
        state=TaskState.REMOVED, error_code=reason, settled_at=timezone.now()
    )


def _holder(task: Dispatched) -> dict[str, Any]:
    return {"task": task.id, "token": task.token}
