"""Each verb of the durable tasks, and each row of their table of states (docs/architecture.md, Data and states)."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.errors import DispatchNotAllowed
from embeddings.models import EmbeddingTask, Provider, RepositoryOutcome
from embeddings.states import TaskPriority, TaskState
from tests.support.factories import make_generation, make_outcome, make_provider, make_run, make_task

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]

PAST = "2000-01-01T00:00Z"


@pytest.fixture
def run():
    return make_run()


@pytest.fixture
def outcome(run):
    return make_outcome(run, status="embedding")


def admit(provider, slots=1):
    return task_queue.admit(provider.pk, lambda cap: slots, "fair")


def dispatched(outcome, **values):
    """A task of the outcome, held by the test."""
    task = make_task(outcome, **values)
    held = admit(outcome.run.provider, slots=9)
    assert held.id == task.pk
    return task, held


def forbid(run):
    type(run).objects.filter(pk=run.pk).update(dispatch_allowed=False)


def lose(task):
    EmbeddingTask.objects.filter(pk=task.pk).update(lease_expires_at=PAST)


def state_of(task):
    task.refresh_from_db()
    return TaskState(task.state), task.error_code


def left_for(moment):
    return (moment - timezone.now()).total_seconds()


class TestPutting:
    def test_a_batch_belongs_to_its_run_and_outcome(self, run, outcome):
        with transaction.atomic():
            task = task_queue.put_batch(outcome, 3)
        assert (task.provider_id, task.generation_id, task.run_id) == (run.provider_id, run.generation_id, run.pk)
        assert (task.state, task.priority, task.text_count) == (TaskState.QUEUED, TaskPriority.BATCH, 3)

    def test_a_batch_is_refused_once_the_run_does_not_dispatch(self, run, outcome):
        forbid(run)
        with pytest.raises(DispatchNotAllowed), transaction.atomic():
            task_queue.put_batch(outcome, 1)
        assert not EmbeddingTask.objects.exists()

    def test_an_interactive_text_expires(self, run):
        task = task_queue.put_interactive(run.provider, run.generation, ["a", "b"], 60_000)
        task.refresh_from_db()
        assert (task.priority, task.texts, task.text_count) == (TaskPriority.INTERACTIVE, ["a", "b"], 2)
        assert 50 < left_for(task.expires_at) <= 60


class TestAdmitting:
    def test_dispatches_with_a_token_a_lease_and_a_slot(self, outcome, settings):
        task, held = dispatched(outcome)
        task.refresh_from_db()
        assert (task.state, task.slot, task.attempts) == (TaskState.DISPATCHED, 0, 1)
        assert (task.dispatch_token, len(held.token)) == (held.token, 32)
        assert settings.LEASE_MS / 1000 - 10 < left_for(task.lease_expires_at) <= settings.LEASE_MS / 1000
        assert left_for(task.dispatched_at) <= 0

    def test_counts_the_call_on_the_outcome(self, outcome):
        dispatched(outcome)
        outcome.refresh_from_db()
        assert outcome.provider_calls == 1
        assert outcome.last_dispatched_at is not None

    def test_nothing_when_nothing_is_queued_or_the_provider_has_gone(self, run):
        assert admit(run.provider) is None
        assert task_queue.admit(10**9, lambda cap: 1, "fair") is None

    def test_nothing_while_the_slot_is_taken(self, outcome):
        dispatched(outcome)
        make_task(outcome)
        assert admit(outcome.run.provider) is None

    def test_the_database_itself_refuses_a_second_dispatch(self, outcome):
        """Whatever a broken admission does: the twin of the check above."""
        dispatched(outcome)
        other = make_task(outcome)
        with pytest.raises(IntegrityError), transaction.atomic():
            EmbeddingTask.objects.filter(pk=other.pk).update(state=TaskState.DISPATCHED, slot=0)

    def test_a_cap_that_was_lowered_bounds_how_many_are_out(self, outcome):
        tasks = [make_task(outcome) for _ in range(4)]
        held = [admit(outcome.run.provider, slots=3) for _ in range(3)]
        task_queue.fail(held[0], "X", "")
        assert [task.slot for task in EmbeddingTask.objects.order_by("pk")[:3]] == [None, 1, 2]
        assert admit(outcome.run.provider, slots=2) is None
        task_queue.fail(held[1], "X", "")
        assert admit(outcome.run.provider, slots=2).id == tasks[3].pk

    def test_not_while_the_provider_is_paused(self, outcome):
        make_task(outcome)
        Provider.objects.update(is_paused=True)
        assert admit(outcome.run.provider) is None

    def test_no_batch_while_the_provider_is_busy_but_an_interactive_text(self, outcome):
        make_task(outcome)
        Provider.objects.update(busy_until=timezone.now() + timedelta(minutes=1))
        assert admit(outcome.run.provider) is None
        text = task_queue.put_interactive(outcome.run.provider, outcome.run.generation, ["a"], 5_000)
        assert admit(outcome.run.provider).id == text.pk
        Provider.objects.update(busy_until=timezone.now() - timedelta(seconds=1))
        assert admit(outcome.run.provider, slots=2).priority == TaskPriority.BATCH

    def test_not_for_a_run_that_does_not_dispatch(self, outcome):
        make_task(outcome)
        forbid(outcome.run)
        assert admit(outcome.run.provider) is None

    def test_no_batch_of_a_generation_that_is_not_the_providers_any_more(self, outcome):
        make_task(outcome)
        Provider.objects.update(embedding_model="another")
        assert admit(outcome.run.provider) is None

    def test_an_interactive_text_may_ask_an_older_generation(self, run):
        older = make_generation(run.provider, model="older")
        text = task_queue.put_interactive(run.provider, older, ["a"], 5_000)
        assert admit(run.provider).id == text.pk

    def test_an_expired_text_is_removed(self, run):
        text = task_queue.put_interactive(run.provider, run.generation, ["a"], -1)
        assert admit(run.provider) is None
        assert state_of(text) == (TaskState.REMOVED, codes.EXPIRED)
        assert text.settled_at is not None

    def test_another_providers_slot_is_its_own(self, outcome):
        dispatched(outcome)
        elsewhere = make_outcome(make_run(make_provider()), status="embedding")
        task = make_task(elsewhere)
        assert admit(elsewhere.run.provider).id == task.pk


class TestHolding:
    def test_settling_frees_the_slot_and_keeps_the_lease(self, outcome):
        task, held = dispatched(outcome)
        lose(task)
        assert task_queue.settle(held)
        assert state_of(task) == (TaskState.ANSWERED, "")
        assert (task.slot, task.call_ended_by, task.settled_at) == (None, "reply", None)
        assert left_for(task.lease_expires_at) > 5

    def test_settling_again_still_holds_the_task(self, outcome):
        """A retry whose first try was committed, and whose connection broke before it heard so, stores its reply."""
        task, held = dispatched(outcome)
        assert task_queue.settle(held)
        assert task_queue.settle_and_admit(held, lambda cap: 1, "fair") == (True, None)
        assert task_queue.mark_stored(held)
        assert not task_queue.settle(held)
        assert state_of(task) == (TaskState.STORED, "")

    def test_settling_admits_the_next_in_one_transaction(self, outcome):
        _, held = dispatched(outcome)
        following = make_task(outcome)
        was_held, admitted = task_queue.settle_and_admit(held, lambda cap: 1, "fair")
        assert (was_held, admitted.id) == (True, following.pk)

    def test_a_call_longer_than_its_lease_is_not_reclaimed_by_its_own_settling(self, outcome):
        task, held = dispatched(outcome)
        lose(task)
        assert task_queue.settle_and_admit(held, lambda cap: 1, "fair") == (True, None)
        assert state_of(task) == (TaskState.ANSWERED, "")

    def test_stored_is_the_end(self, outcome):
        task, held = dispatched(outcome)
        assert not task_queue.mark_stored(held)
        task_queue.settle(held)
        assert task_queue.mark_stored(held)
        assert state_of(task) == (TaskState.STORED, "")
        assert task.settled_at is not None
        assert not task_queue.is_held(held)

    def test_renewing_moves_the_lease(self, outcome):
        task, held = dispatched(outcome)
        lose(task)
        assert task_queue.renew(held)
        task.refresh_from_db()
        assert left_for(task.lease_expires_at) > 5

    @pytest.mark.parametrize("is_answered", [False, True])
    def test_failing_settles_and_frees(self, outcome, is_answered):
        task, held = dispatched(outcome)
        if is_answered:
            task_queue.settle(held)
        assert task_queue.fail(held, "CODE", "x" * 5_000)
        assert state_of(task) == (TaskState.FAILED, "CODE")
        assert (task.slot, len(task.error_detail)) == (None, 1_000)
        assert task.call_ended_by == ("reply" if is_answered else "error")
        assert task.settled_at is not None

    def test_a_removed_task_keeps_its_slot_until_its_call_has_ended(self, outcome):
        task, held = dispatched(outcome)
        assert task_queue.cancel_dispatched(codes.RUN_CANCELLED, outcome=outcome.pk) == 1
        assert state_of(task) == (TaskState.REMOVED, codes.RUN_CANCELLED)
        assert (task.slot, task.call_ended_at) == (0, None)
        assert task_queue.renew(held)
        assert task_queue.release_slot(held)
        task.refresh_from_db()
        assert (task.slot, task.call_ended_by) == (None, "late")

    def test_given_back_it_is_queued_uncounted(self, outcome):
        task, held = dispatched(outcome)
        assert task_queue.give_back(held)
        assert state_of(task) == (TaskState.QUEUED, "")
        assert (task.attempts, task.losses, task.slot, task.dispatch_token) == (0, 0, None, "")

    def test_given_back_to_a_run_that_does_not_dispatch_it_is_removed(self, outcome):
        task, held = dispatched(outcome)
        forbid(outcome.run)
        assert task_queue.give_back(held)
        assert state_of(task)[0] == TaskState.REMOVED


VERBS = {
    "settle": task_queue.settle,
    "settle_and_admit": lambda held: task_queue.settle_and_admit(held, lambda cap: 1, "fair")[0],
    "mark_stored": task_queue.mark_stored,
    "fail": lambda held: task_queue.fail(held, "X", ""),
    "remove_held": lambda held: task_queue.remove_held(held, "X"),
    "renew": task_queue.renew,
    "give_back": task_queue.give_back,
    "release_slot": task_queue.release_slot,
    "requeue_busy": lambda held: task_queue.requeue_busy(held, 1, "") is not None,
}


class TestFencing:
    """A holder whose token is gone changes nothing, whatever it does."""

    @pytest.fixture
    def fenced(self, outcome):
        task, former = dispatched(outcome)
        lose(task)
        current = admit(outcome.run.provider)
        assert (current.id, current.token == former.token) == (task.pk, False)
        return task, former

    @pytest.mark.parametrize("verb", VERBS)
    def test_by_the_token(self, fenced, verb):
        task, former = fenced
        before = EmbeddingTask.objects.filter(pk=task.pk).values().get()
        assert not VERBS[verb](former)
        assert EmbeddingTask.objects.filter(pk=task.pk).values().get() == before

    @pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"mark_stored", "release_slot"}))
    def test_twin_a_holder_that_is_not_asked_for_its_token_changes_the_next_ones_task(self, fenced, verb, monkeypatch):
        task, former = fenced
        monkeypatch.setattr(
            task_queue,
            "_holder",
            lambda held: {
                "task": held.id,
                "token": EmbeddingTask.objects.values_list("dispatch_token", flat=True).get(pk=held.id),
            },
        )
        before = EmbeddingTask.objects.filter(pk=task.pk).values().get()
        assert VERBS[verb](former)
        assert EmbeddingTask.objects.filter(pk=task.pk).values().get() != before


class TestLosing:
    def test_twice_it_is_queued_and_the_third_time_it_fails(self, outcome):
        task, _ = dispatched(outcome)
        for losses in (1, 2):
            lose(task)
            task_queue.reclaim(outcome.run.provider_id)
            assert state_of(task) == (TaskState.QUEUED, "")
            assert (task.losses, task.slot, task.dispatch_token, task.call_ended_by) == (losses, None, "", "lost")
            assert admit(outcome.run.provider).id == task.pk
        lose(task)
        task_queue.reclaim(outcome.run.provider_id)
        assert state_of(task) == (TaskState.FAILED, codes.TASK_LOST)
        assert (task.losses, task.slot) == (3, None)

    def test_an_answer_that_was_never_stored_is_lost_like_a_call(self, outcome):
        task, held = dispatched(outcome)
        task_queue.settle(held)
        lose(task)
        assert admit(outcome.run.provider).id == task.pk
        task.refresh_from_db()
        assert task.losses == 1

    def test_a_lease_that_holds_is_left_alone(self, outcome):
        task, _ = dispatched(outcome)
        task_queue.reclaim(outcome.run.provider_id)
        assert state_of(task) == (TaskState.DISPATCHED, "")

    def test_of_a_run_that_does_not_dispatch_it_is_removed(self, outcome):
        task, _ = dispatched(outcome)
        forbid(outcome.run)
        lose(task)
        task_queue.reclaim(outcome.run.provider_id)
        assert state_of(task)[0] == TaskState.REMOVED
        assert task.slot is None

    def test_the_slot_of_a_removed_task_comes_free_with_its_holders_lease(self, outcome):
        task, _ = dispatched(outcome)
        task_queue.cancel_dispatched(codes.RUN_CANCELLED, outcome=outcome.pk)
        lose(task)
        other = make_task(outcome)
        assert admit(outcome.run.provider).id == other.pk
        assert state_of(task) == (TaskState.REMOVED, codes.RUN_CANCELLED)

    def test_an_interactive_text_is_queued_again(self, run):
        text = task_queue.put_interactive(run.provider, run.generation, ["a"], 60_000)
        admit(run.provider)
        lose(text)
        assert admit(run.provider).id == text.pk


class TestBusy:
    def test_it_goes_back_and_the_provider_takes_no_batch_until_then(self, outcome):
        task, held = dispatched(outcome)
        assert task_queue.requeue_busy(held, 60_000, "429") == TaskState.QUEUED
        assert state_of(task) == (TaskState.QUEUED, "")
        assert (task.slot, task.busy_requeues, task.losses, task.call_ended_by) == (None, 1, 0, "busy")
        assert 55 < left_for(Provider.objects.get(pk=task.provider_id).busy_until) <= 60
        assert admit(outcome.run.provider) is None

    def test_too_often_it_fails(self, outcome, settings):
        settings.BUSY_REQUEUES_MAX = 10
        task, held = dispatched(outcome, busy_requeues=9)
        assert task_queue.requeue_busy(held, 1, "429") == TaskState.QUEUED
        Provider.objects.update(busy_until=None)
        held = admit(outcome.run.provider)
        assert task_queue.requeue_busy(held, 1, "429") == TaskState.FAILED
        assert state_of(task) == (TaskState.FAILED, codes.PROVIDER_BUSY)

    def test_for_too_long_it_fails(self, outcome, settings):
        settings.BUSY_TOTAL_MAX_MS = 900_000
        task, held = dispatched(outcome, busy_since=timezone.now() - timedelta(minutes=16))
        assert task_queue.requeue_busy(held, 1, "429") == TaskState.FAILED
        task_2, held = dispatched(make_outcome(outcome.run), busy_since=timezone.now() - timedelta(minutes=14))
        assert task_queue.requeue_busy(held, 1, "429") == TaskState.QUEUED
        assert (task.pk, state_of(task_2)[0]) != (None, TaskState.FAILED)

    def test_of_a_run_that_does_not_dispatch_it_is_removed(self, outcome):
        task, held = dispatched(outcome)
        forbid(outcome.run)
        assert task_queue.requeue_busy(held, 1, "429") == TaskState.REMOVED
        assert state_of(task)[0] == TaskState.REMOVED


class TestWorkToDo:
    def test_a_queued_task_and_a_lost_lease_are_work(self, outcome):
        provider_id = outcome.run.provider_id
        assert not task_queue.wants_drain(provider_id)
        task, _ = dispatched(outcome)
        assert not task_queue.wants_drain(provider_id)
        assert not task_queue.has_work(provider_id)
        lose(task)
        assert task_queue.wants_drain(provider_id)
        assert task_queue.providers_with_work() == [provider_id]

    def test_what_cannot_be_admitted_does_not_stand_idle(self, outcome):
        provider = outcome.run.provider
        make_task(outcome)
        assert task_queue.wants_drain(provider.pk)
        Provider.objects.update(is_paused=True)
        assert not task_queue.wants_drain(provider.pk)
        Provider.objects.update(is_paused=False, busy_until=timezone.now() + timedelta(minutes=1))
        assert not task_queue.wants_drain(provider.pk)

    def test_a_queue_behind_a_taken_slot_does_not_stand_idle(self, outcome):
        dispatched(outcome)
        make_task(outcome)
        assert not task_queue.wants_drain(outcome.run.provider_id)
        assert task_queue.has_work(outcome.run.provider_id)

    def test_calls_are_counted_up_and_down(self, outcome):
        _, held = dispatched(outcome)
        task_queue.count_calls(held, 3)
        task_queue.count_calls(held, -1)
        task_queue.count_calls(held, 0)
        assert RepositoryOutcome.objects.get(pk=outcome.pk).provider_calls == 3


def test_the_clock_is_the_databases_own(outcome):
    _, _ = dispatched(outcome)
    with connection.cursor() as cursor:
        cursor.execute("SELECT lease_expires_at > dispatched_at FROM embeddings_embeddingtask")
        assert bool(cursor.fetchone()[0])
