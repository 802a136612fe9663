"""Durable embedding tasks and all transitions of their states (docs/architecture.md, Embedding, Data and states).

Locks are taken in one order everywhere: provider, run, outcome, task. Putting a task and opening a circuit lock the run and
never the provider. Every way into `queued` asks `refusal` in the same transaction, under the run's lock: decided means over.
The raw statements are in `task_statements`, and are run here alone. The counts of outcomes are added to here alone.

A transition outlasts a database that is away for a moment (`retried`): a call at the provider is never lost to a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from embeddings import codes
from embeddings.dispatch import task_statements as sql
from embeddings.errors import DispatchNotAllowed, ProviderConfigurationError
from embeddings.models import EmbeddingTask, Provider, RepositoryOutcome
from embeddings.runtime.retry import retried
from embeddings.states import OUTCOME_UNFINISHED, TaskPriority, TaskState

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from embeddings.models import EmbeddingGeneration

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
    """Queues a batch task of the outcome. The caller binds its rows in the same transaction.

    Raises DispatchNotAllowed if the run's circuit is open, it was cancelled, or the outcome is decided.
    """
    if refusal(outcome.run_id, outcome.pk):
        raise DispatchNotAllowed
    run = lock_run(outcome.run_id)
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
    provider: Provider, generation: EmbeddingGeneration, texts: Sequence[str], timeout_ms: int
) -> EmbeddingTask:
    """Queues the texts of one interactive caller; undispatched after `timeout_ms`, the task is removed."""
    return EmbeddingTask.objects.create(
        provider=provider,
        generation=generation,
        priority=TaskPriority.INTERACTIVE,
        texts=list(texts),
        text_count=len(texts),
        expires_at=Now() + timedelta(milliseconds=timeout_ms),
    )


def lock_provider(provider_id: int) -> None:
    """Locks the provider, before the run: an admission holds this lock while it holds tasks."""
    with connection.cursor() as cursor:
        _lock_provider(cursor, provider_id)


@dataclass(frozen=True)
class LockedRun:
    provider_id: int
    generation_id: int
    dispatch_allowed: bool


def lock_run(run_id: int) -> LockedRun:
    """Locks the run for the rest of the transaction and reads its provider, generation and whether it dispatches."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT provider_id, generation_id, dispatch_allowed FROM embeddings_tenantrun WHERE id = %s {sql.lock()}",
            [run_id],
        )
        provider_id, generation_id, allowed = cursor.fetchone()
    return LockedRun(provider_id, generation_id, bool(allowed))


def refusal(run_id: int | None, outcome_id: int | None) -> str:
    """Why no task of this run and outcome may be queued, as a code; empty if it may. Locks the run for the transaction.

    An outcome is decided under the run's lock alone: one that is undecided here stays so until the transaction ends.
    """
    if run_id is None or outcome_id is None:
        return ""
    if not lock_run(run_id).dispatch_allowed:
        return codes.DISPATCH_STOPPED
    is_undecided = RepositoryOutcome.objects.filter(pk=outcome_id, status__in=OUTCOME_UNFINISHED).exists()
    return "" if is_undecided else codes.OUTCOME_DECIDED


# --- admitting ------------------------------------------------------------------------------------------------------
@retried
def admit(provider_id: int, slots: Slots, order: Order) -> Dispatched | None:
    """Reclaims lost leases and dispatches the next task, if a slot is free: one transaction under the provider's lock.

    `slots` judges the provider's cap, read anew each time, and may raise ProviderConfigurationError. `fair`: the tenant
    least recently dispatched first, and its outcome least recently dispatched; `fifo`: as they were put. Interactive tasks
    go first, but a batch that has been overtaken for `LANE_BATCH_MAX_WAIT_MS` goes next.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        provider = _lock_provider(cursor, provider_id, sql.LOCK_TO_ADMIT)
        if provider is None:
            return None
        _reclaim(cursor, provider_id)
        return _dispatch_next(cursor, provider, slots, order)


@retried
def settle_and_admit(task: Dispatched, slots: Slots, order: Order) -> tuple[bool, Dispatched | None]:
    """A reply came: the task is answered, its slot free, and the next task dispatched, in one transaction.

    Returns first whether the task was still held. Its lease is renewed, and must be kept until the vectors are stored.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        provider = _lock_provider(cursor, task.provider_id, sql.LOCK_TO_ADMIT)
        held = sql.execute(cursor, sql.SETTLE, **_holder(task)) == 1
        try:
            # Reclaiming would lock runs, which come before the task that is locked by now.
            return held, _dispatch_next(cursor, provider, slots, order) if provider else None
        except ProviderConfigurationError:
            # The reply counts whatever the cap is by now; the next admission raises this again.
            return held, None


@dataclass(frozen=True)
class _ProviderState:
    id: int
    is_paused: bool
    is_busy: bool
    batch_is_due: bool
    was_overtaken: bool
    cap: object


_NO_SLOT = object()


def _lock_provider(cursor: CursorWrapper, provider_id: int, statement: str | None = None) -> _ProviderState | None:
    # A statement of its own: within the pick, PostgreSQL would use the snapshot from before it waited for the lock.
    sql.execute(cursor, statement or sql.LOCK_PROVIDER, provider=provider_id)
    row = cursor.fetchone()
    if row is None:
        return None
    return _ProviderState(provider_id, bool(row[0]), bool(row[1]), bool(row[2]), bool(row[3]), cap=row[4])


def _free_slot(cursor: CursorWrapper, provider_id: int, slots: int | None) -> Any:
    if slots is None:
        return None
    sql.execute(cursor, sql.TAKEN_SLOTS, provider=provider_id)
    taken = {row[0] for row in cursor.fetchall()}
    # The cap bounds how many are out, also when it was lowered while higher slots are taken.
    if len(taken) >= slots:
        return _NO_SLOT
    return next(slot for slot in range(slots) if slot not in taken)


def _dispatch_next(cursor: CursorWrapper, provider: _ProviderState, slots: Slots, order: Order) -> Dispatched | None:
    if provider.is_paused:
        return None
    slot = _free_slot(cursor, provider.id, slots(provider.cap))
    if slot is _NO_SLOT:
        return None
    pick = sql.PICK[order, provider.batch_is_due]
    priority_most = TaskPriority.INTERACTIVE if provider.is_busy else TaskPriority.BATCH
    while True:
        sql.execute(cursor, pick, provider=provider.id, priority_most=priority_most)
        picked = cursor.fetchone()
        if picked is None:
            return None
        task = Dispatched(picked[0], secrets.token_hex(16), provider.id, *picked[1:])
        if _dispatch(cursor, task, slot):
            break
    # The time of the first overtaking is kept: a batch queued long ago in a long backlog is not overtaken.
    if task.is_interactive:
        sql.execute(cursor, sql.OVERTAKING, provider=provider.id)
    elif provider.was_overtaken:
        sql.execute(cursor, sql.NOT_OVERTAKEN, provider=provider.id)
    return task


def _dispatch(cursor: CursorWrapper, task: Dispatched, slot: int | None) -> bool:
    """Dispatches the picked task. False if it was removed since."""
    if task.outcome_id is not None:
        # The outcome before the task: the order in which an opening circuit locks them.
        instant = f"{timezone.now():%Y-%m-%d %H:%M:%S.%f}"
        if sql.execute(cursor, sql.COUNT_DISPATCH, outcome=task.outcome_id, instant=instant) == 0:
            # It was decided since.
            return False
    if sql.execute(cursor, sql.DISPATCH, slot=slot, **_holder(task)) == 1:
        return True
    count_calls(task, -1)
    return False


def peek(provider_id: int, order: Order) -> int | None:
    """The id of the task that would most likely be admitted next; reads without a lock."""
    with connection.cursor() as cursor:
        sql.execute(cursor, sql.PICK[order, False], provider=provider_id, priority_most=TaskPriority.BATCH)
        row = cursor.fetchone()
    return row[0] if row else None


@retried
def has_work(provider_id: int) -> bool:
    """Whether a task is queued, or a lost lease waits to be reclaimed."""
    with connection.cursor() as cursor:
        sql.execute(cursor, sql.HAS_WORK, provider=provider_id)
        return cursor.fetchone() is not None


@retried
def wants_drain(provider_id: int) -> bool:
    """Whether a task is queued that could be admitted now, or a lost lease waits to be reclaimed: a drain is wanted."""
    with connection.cursor() as cursor:
        sql.execute(cursor, sql.WANTS_DRAIN, provider=provider_id)
        return cursor.fetchone() is not None


def providers_with_work() -> list[int]:
    """The providers at which a drain is wanted."""
    return [pk for pk in Provider.objects.values_list("pk", flat=True).order_by("pk") if wants_drain(pk)]


# --- the holder's transitions: each matches no row once its token is gone -----------------------------------------------
@retried
def is_held(task: Dispatched) -> bool:
    return EmbeddingTask.objects.filter(
        pk=task.id, dispatch_token=task.token, state__in=(TaskState.DISPATCHED, TaskState.ANSWERED)
    ).exists()


def renew(task: Dispatched) -> bool:
    """Renews the lease, also that of a removed task whose call is still out. False once the holder is fenced off."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.RENEW, **_holder(task)) == 1


@retried
def fail(task: Dispatched, code: str, detail: str) -> bool:
    """The task's final failure: settled, its slot free."""
    return _end(task, TaskState.FAILED, code, detail, ended_by="error")


@retried
def remove_held(task: Dispatched, reason: str, detail: str = "") -> bool:
    """The holder gives the task up for good: removed with its reason, its slot free."""
    return _end(task, TaskState.REMOVED, reason, detail, ended_by="cancel")


@retried
def release_slot(task: Dispatched) -> bool:
    """Frees the slot of a task that was removed while its call was out, now that the call has ended."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.RELEASE_SLOT, **_holder(task)) == 1


@retried
def settle(task: Dispatched) -> bool:
    """A reply came: the task is answered, its slot free, its lease renewed until it is stored. Admits nothing."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.SETTLE, **_holder(task)) == 1


def mark_stored(task: Dispatched) -> bool:
    """The last step of storing, in its transaction."""
    with connection.cursor() as cursor:
        return sql.execute(cursor, sql.MARK_STORED, **_holder(task)) == 1


@retried
def was_removed(task: Dispatched) -> bool:
    """Whether the task was cancelled while its call was out."""
    return EmbeddingTask.objects.filter(pk=task.id, state=TaskState.REMOVED, dispatch_token=task.token).exists()


@retried
def removed_of(held: Sequence[Dispatched]) -> set[Dispatched]:
    """Those of the tasks that were cancelled while their calls were out, by one query."""
    removed = EmbeddingTask.objects.filter(pk__in=[task.id for task in held], state=TaskState.REMOVED)
    tokens = dict(removed.values_list("pk", "dispatch_token"))
    return {task for task in held if tokens.get(task.id) == task.token}


@retried
def count_calls(task: Dispatched, further: int) -> None:
    """Corrects the outcome's count of HTTP requests, one for each dispatch: more for retries, fewer if none left."""
    if further and task.outcome_id is not None:
        add_counts(task.outcome_id, provider_calls=further)


def add_counts(outcome_id: int, **further: int) -> None:
    """Adds to the counts of an outcome: `embedded`, `reused`, `provider_calls`."""
    counts = {name: F(name) + number for name, number in further.items()}
    RepositoryOutcome.objects.filter(pk=outcome_id).update(**counts)


@retried
def requeue_busy(task: Dispatched, retry_after_ms: int, detail: str) -> TaskState | None:
    """Returns the batch of a busy provider to the queue; the provider takes no batch for `retry_after_ms`.

    After too many requeues, or too long a time, the task fails as busy; where its run no longer dispatches, it is removed.
    Returns the new state, None if the task is no longer held.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        _lock_provider(cursor, task.provider_id)
        sql.execute(cursor, sql.PROVIDER_BUSY, ahead_ms=retry_after_ms, provider=task.provider_id)
        if refused := refusal(task.run_id, task.outcome_id):
            return TaskState.REMOVED if remove_held(task, refused) else None
        too_often = Q(busy_requeues__gte=settings.BUSY_REQUEUES_MAX)
        too_long = Q(busy_since__lt=Now() - timedelta(milliseconds=settings.BUSY_TOTAL_MAX_MS))
        if EmbeddingTask.objects.filter(too_often | too_long, pk=task.id).exists():
            return TaskState.FAILED if fail(task, codes.PROVIDER_BUSY, detail) else None
        return TaskState.QUEUED if sql.execute(cursor, sql.REQUEUE_BUSY, **_holder(task)) == 1 else None


@retried
def give_back(task: Dispatched) -> bool:
    """Returns the task of a worker that shuts down, uncounted; where its run no longer dispatches, it is removed."""
    with transaction.atomic(), connection.cursor() as cursor:
        if refused := refusal(task.run_id, task.outcome_id):
            return remove_held(task, refused)
        return sql.execute(cursor, sql.GIVE_BACK, **_holder(task)) == 1


def _end(task: Dispatched, state: TaskState, code: str, detail: str, ended_by: str) -> bool:
    with connection.cursor() as cursor:
        ended = sql.execute(
            cursor, sql.END, state=state, code=code, detail=detail[:1000], ended_by=ended_by, **_holder(task)
        )
    return ended == 1


# --- reclaiming and removing ------------------------------------------------------------------------------------------
def _reclaim(cursor: CursorWrapper, provider_id: int) -> None:
    """Requeues tasks whose lease was lost, if their run still dispatches; the third loss fails. Removes expired tasks."""
    sql.execute(cursor, sql.EXPIRE, provider=provider_id, reason=codes.EXPIRED)
    sql.execute(cursor, sql.FREE_ABANDONED_SLOTS, provider=provider_id)
    sql.execute(cursor, sql.LOST, provider=provider_id)
    # In one order: runs are locked.
    for task_id, run_id, outcome_id, losses in sorted(cursor.fetchall()):
        if refused := refusal(run_id, outcome_id):
            sql.execute(cursor, sql.LOSE_TO_END, task=task_id, state=TaskState.REMOVED, code=refused)
        elif losses + 1 >= LOSSES_MAX:
            sql.execute(cursor, sql.LOSE_TO_END, task=task_id, state=TaskState.FAILED, code=codes.TASK_LOST)
        else:
            sql.execute(cursor, sql.LOSE_TO_QUEUE, task=task_id)


@retried
def reclaim(provider_id: int) -> None:
    """Reclaims the provider's lost leases without admitting anything."""
    with transaction.atomic(), connection.cursor() as cursor:
        if _lock_provider(cursor, provider_id):
            _reclaim(cursor, provider_id)


@retried
def fail_queued(provider_id: int, code: str, detail: str) -> list[Dispatched]:
    """Fails every queued task of a provider whose configuration admits nothing; returns them."""
    with transaction.atomic(), connection.cursor() as cursor:
        _lock_provider(cursor, provider_id)
        queued = list(
            EmbeddingTask.objects.filter(provider=provider_id, settled_at=None, state=TaskState.QUEUED).order_by("pk")
        )
        failed = []
        for row in queued:
            if sql.execute(cursor, sql.FAIL_QUEUED, task=row.pk, code=code, detail=detail[:1000]) == 1:
                failed.append(
                    Dispatched(row.pk, "", provider_id, row.generation_id, row.priority, row.run_id, row.outcome_id)
                )
    return failed


@retried
def remove_stranded() -> int:
    """Removes queued tasks of decided outcomes, which nothing dispatches: rows bound to them would wait for ever.

    No transition leaves such a task behind; this repairs rows that an earlier version did. Returns how many.
    """
    removed = 0
    for run_id in set(stranded_tasks().values_list("run", flat=True)):
        with transaction.atomic():
            lock_run(run_id)
            of_run = list(stranded_tasks().filter(run=run_id).values_list("pk", flat=True))
            removed += remove_queued(codes.OUTCOME_DECIDED, pk__in=of_run)
    return removed


def stranded_tasks() -> QuerySet[EmbeddingTask]:
    """Queued tasks of decided outcomes."""
    queued = EmbeddingTask.objects.filter(settled_at=None, state=TaskState.QUEUED, outcome__isnull=False)
    return queued.exclude(outcome__status__in=OUTCOME_UNFINISHED)


def remove_queued(reason: str, **where: Any) -> int:
    """Removes the queued tasks that match; the caller holds their run's lock. Returns how many."""
    return EmbeddingTask.objects.filter(state=TaskState.QUEUED, **where).update(
        state=TaskState.REMOVED, error_code=reason, settled_at=Now()
    )


def cancel_dispatched(reason: str, **where: Any) -> int:
    """Removes dispatched tasks for their callers; the slot stays taken until the call has ended, or its lease is lost."""
    return EmbeddingTask.objects.filter(state=TaskState.DISPATCHED, **where).update(
        state=TaskState.REMOVED, error_code=reason, settled_at=Now()
    )


def _holder(task: Dispatched) -> dict[str, Any]:
    return {"task": task.id, "token": task.token}
