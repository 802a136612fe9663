"""The lane: single file, interactive first, bounded overtaking, repositories in turn."""

import itertools
import string
from datetime import timedelta

import pytest
from django.utils import timezone

from embeddings.dispatch import task_queue
from embeddings.dispatch import task_statements as sql
from embeddings.dispatch.admission import POLICIES
from embeddings.models import EmbeddingTask, Provider, RepositoryOutcome
from embeddings.states import ProviderKind, TaskPriority
from embeddings.timeouts import ProviderTimeoutError
from tests.support.factories import (
    make_generation,
    make_outcome,
    make_provider,
    make_repository,
    make_run,
    make_task,
    make_tenant,
)

LANE = POLICIES[ProviderKind.OPENAI_COMPATIBLE]

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def provider():
    return make_provider()


@pytest.fixture
def outcomes(provider):
    """Outcomes of one run, made as they are named."""
    run = make_run(provider)
    return {name: make_outcome(run, status="embedding") for name in "abc"}


def put(outcomes, *names):
    return [make_task(outcomes[name]) for name in names]


def text(provider):
    return task_queue.put_interactive(provider, make_generation(provider), ["words"], 60_000)


def go(provider):
    """The next dispatched task, and the lane free again."""
    task = LANE.admit(provider)
    assert task is not None
    assert task_queue.settle(task)
    return task


def order(provider, outcomes):
    """Who goes, until nobody is left: an outcome's name, or `i` for an interactive text."""
    names = {outcome.pk: name for name, outcome in outcomes.items()}
    found = ""
    while task := LANE.admit(provider):
        task_queue.settle(task)
        found += names.get(task.outcome_id, "i")
    return found


class TestSingleFile:
    def test_whatever_the_row_says_one_task_is_out(self, provider, outcomes):
        Provider.objects.update(max_in_flight=5)
        put(outcomes, "a", "b")
        assert LANE.admit(provider) is not None
        assert LANE.admit(provider) is None

    def test_settling_hands_the_lane_on(self, provider, outcomes):
        first, second = put(outcomes, "a", "b")
        task = LANE.admit(provider)
        held, following = LANE.settle_and_admit(task)
        assert (task.id, held, following.id) == (first.pk, True, second.pk)

    def test_a_fenced_holders_reply_does_not_count_and_does_not_free_the_lane(self, provider, outcomes):
        put(outcomes, "a", "b")
        former = LANE.admit(provider)
        EmbeddingTask.objects.filter(pk=former.id).update(lease_expires_at="2000-01-01T00:00Z")
        current = LANE.admit(provider)
        assert LANE.settle_and_admit(former) == (False, None)
        assert task_queue.is_held(current)

    def test_the_likely_next_is_who_goes_next(self, provider, outcomes):
        put(outcomes, "a", "b")
        assert LANE.likely_next(provider) == go(provider).id
        assert LANE.likely_next(provider) == go(provider).id
        assert LANE.likely_next(provider) is None


class TestFairness:
    def test_repositories_alternate(self, provider, outcomes):
        put(outcomes, *"aaaaabbbbb")
        assert order(provider, outcomes) == "ababababab"

    def test_one_that_comes_later_is_in_turn_at_once(self, provider, outcomes):
        put(outcomes, *"aaaabbbb")
        for _ in range(4):
            go(provider)
        put(outcomes, "c", "c")
        assert order(provider, outcomes) == "cabcab"

    def test_one_that_puts_one_at_a_time_is_not_starved(self, provider, outcomes):
        put(outcomes, *"bbbbb")
        names = {outcome.pk: name for name, outcome in outcomes.items()}
        found = ""
        for _ in range(3):
            put(outcomes, "a")
            found += names[go(provider).outcome_id] + names[go(provider).outcome_id]
        assert found == "bababa" or found == "ababab"


def neighbours(provider, many=3):
    """Outcomes of two tenants: `a`, `b`, `c`, ... of one with this many repositories, and `z` of one with a single one."""
    run = make_run(provider)
    crowd = make_tenant(embedding_provider=provider)
    outcomes = {
        name: make_outcome(run, make_repository(crowd), status="embedding") for name in string.ascii_lowercase[:many]
    }
    return outcomes | {"z": make_outcome(run, status="embedding")}


class TestTenantsTakeTurns:
    def test_many_repositories_have_one_share(self, provider):
        outcomes = neighbours(provider)
        put(outcomes, *"aabbcczzzzzz")
        assert order(provider, outcomes) == "azbzczazbzcz"

    def test_a_turn_outlasts_the_outcome_that_had_it(self, provider):
        """Otherwise a tenant whose small repositories end one after another would always come first."""
        outcomes = neighbours(provider)
        put(outcomes, *"azz")
        names = {outcome.pk: name for name, outcome in outcomes.items()}
        found = names[go(provider).outcome_id]
        RepositoryOutcome.objects.filter(pk=outcomes["a"].pk).update(status="succeeded")
        put(outcomes, "b")
        found += names[go(provider).outcome_id] + names[go(provider).outcome_id]
        RepositoryOutcome.objects.filter(pk=outcomes["b"].pk).update(status="succeeded")
        put(outcomes, "c")
        assert found + order(provider, outcomes) == "azbzc"

    def test_twin_without_the_tenants_each_repository_has_a_share(self, provider, monkeypatch):
        by_outcome = {key: pick.replace(sql.TENANT_LAST_DISPATCHED, "(SELECT 1)") for key, pick in sql.PICK.items()}
        monkeypatch.setattr(sql, "PICK", by_outcome)
        outcomes = neighbours(provider)
        put(outcomes, *"aabbcczzzzzz")
        assert order(provider, outcomes) == "abczabczzzzz"


class TestInteractiveFirst:
    def test_they_go_before_any_batch_in_the_order_they_came(self, provider, outcomes):
        put(outcomes, "a", "b")
        texts = [text(provider).pk, text(provider).pk]
        assert [go(provider).id, go(provider).id] == texts

    def test_a_batch_overtaken_for_too_long_goes_next(self, provider, outcomes, settings):
        settings.LANE_BATCH_MAX_WAIT_MS = 30_000
        (batch,) = put(outcomes, "a")
        for _ in range(3):
            text(provider)
        assert go(provider).is_interactive
        overtaken(29)
        assert go(provider).is_interactive
        overtaken(31)
        assert go(provider).id == batch.pk
        assert go(provider).is_interactive

    def test_it_counts_from_the_first_overtaking(self, provider, outcomes):
        """Not from the latest: each text that overtakes would otherwise start the wait anew."""
        put(outcomes, "a")
        text(provider), text(provider)
        go(provider)
        first = Provider.objects.get().overtaken_since
        go(provider)
        assert Provider.objects.get().overtaken_since == first

    def test_a_long_backlog_is_no_long_overtaking(self, provider, outcomes):
        put(outcomes, "a", "b")
        EmbeddingTask.objects.update(queued_at=timezone.now() - timedelta(hours=1))
        text(provider)
        assert go(provider).is_interactive

    def test_a_batch_that_goes_ends_the_overtaking(self, provider, outcomes):
        put(outcomes, *"aa")
        for _ in range(3):
            text(provider)
        go(provider)
        overtaken(31)
        kinds = [go(provider).priority for _ in range(4)]
        assert kinds == [TaskPriority.BATCH, TaskPriority.INTERACTIVE, TaskPriority.INTERACTIVE, TaskPriority.BATCH]

    def test_texts_that_overtake_nobody_start_no_wait(self, provider, outcomes):
        text(provider)
        go(provider)
        assert Provider.objects.get().overtaken_since is None

    def test_a_wait_whose_batches_are_gone_is_forgotten(self, provider, outcomes):
        put(outcomes, "a")
        text(provider)
        go(provider)
        EmbeddingTask.objects.filter(priority=TaskPriority.BATCH).delete()
        text(provider)
        go(provider)
        assert Provider.objects.get().overtaken_since is None

    def test_a_flood_of_texts_lets_one_batch_through_each_wait(self, provider, outcomes, settings):
        settings.LANE_BATCH_MAX_WAIT_MS = 0
        put(outcomes, *"aaa")
        for _ in range(6):
            text(provider)
        assert order(provider, outcomes) == "iaiaiaiii"

    def test_while_the_provider_is_busy_a_batch_that_is_due_still_waits(self, provider, outcomes):
        put(outcomes, "a")
        text(provider)
        overtaken(60)
        Provider.objects.update(busy_until=timezone.now() + timedelta(minutes=1))
        assert go(provider).is_interactive


def overtaken(seconds):
    Provider.objects.update(overtaken_since=timezone.now() - timedelta(seconds=seconds))


class TestFinish:
    def test_notifies_while_the_slot_is_held_and_then_frees_it(self, provider, outcomes):
        (task,) = put(outcomes, "a")
        held = LANE.admit(provider)
        slots = []

        def callback(error):
            slots.append(EmbeddingTask.objects.get(pk=task.pk).slot)

        error = ProviderTimeoutError("x")
        assert LANE.finish(held, error, error.code, callback)
        task.refresh_from_db()
        assert (slots, task.slot, task.error_code) == ([0], None, "PROVIDER_TIMEOUT")

    def test_a_holder_whose_lease_was_lost_notifies_nobody(self, provider, outcomes):
        put(outcomes, "a")
        held = LANE.admit(provider)
        EmbeddingTask.objects.update(lease_expires_at="2000-01-01T00:00Z")
        task_queue.reclaim(provider.pk)
        heard = []
        assert not LANE.finish(held, ProviderTimeoutError("x"), "PROVIDER_TIMEOUT", heard.append)
        assert heard == []

    def test_of_another_error_only_frees_the_slot(self, provider, outcomes):
        put(outcomes, "a")
        heard = []
        assert LANE.finish(LANE.admit(provider), ValueError("x"), "X", heard.append)
        assert (heard, EmbeddingTask.objects.exclude(slot=None).count()) == ([], 0)


def test_a_long_run_of_everything_starves_nobody(provider, outcomes, settings):
    settings.LANE_BATCH_MAX_WAIT_MS = 0
    put(outcomes, *itertools.islice(itertools.cycle("abc"), 9))
    for _ in range(9):
        text(provider)
    assert order(provider, outcomes) == "ia" + "ib" + "ic" + "iaibic" * 2
