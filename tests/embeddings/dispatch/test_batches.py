"""Choosing batches: bounded, in order, distinct texts once, and what two halves of a refused one are."""

import pytest
from django.db import transaction

from embeddings.dispatch import batches, task_queue
from embeddings.errors import DispatchNotAllowed
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, KnowledgeRow, Provider, RepositoryOutcome, TenantRun
from embeddings.states import TaskState
from tests.support.factories import make_outcome, make_run, make_version
from tests.support.factories import make_row as row_of
from tests.support.provider_server import vector_of

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def outcome():
    return make_outcome(make_run(), status="embedding")


def rows(outcome, *texts):
    version = make_version(outcome.repository, outcome.run.generation, row_count=len(texts))
    return [row_of(version, text=text, text_hash=store.text_hash(text)).pk for text in texts]


def configure(outcome, **values):
    Provider.objects.update(**values)
    return RepositoryOutcome.objects.select_related("repository", "run__provider").get(pk=outcome.pk)


def queued():
    return [batches.load(task.pk).texts for task in EmbeddingTask.objects.filter(state=TaskState.QUEUED).order_by("pk")]


def dispatched(outcome):
    return task_queue.admit(outcome.run.provider_id, lambda cap: 9, "fair")


class TestChoosing:
    def test_two_batches_at_most_in_the_order_of_the_rows(self, outcome):
        rows(outcome, *"abcdefg")
        assert batches.refill(configure(outcome, batch_size=2)) == 2
        assert queued() == [("a", "b"), ("c", "d")]
        assert batches.refill(outcome) == 0

    def test_bounded_by_characters(self, outcome):
        rows(outcome, "aaaa", "bbbb", "c", "d")
        batches.refill(configure(outcome, batch_characters=5))
        assert queued() == [("aaaa",), ("bbbb", "c")]

    def test_a_text_over_the_bound_goes_alone(self, outcome):
        rows(outcome, "a" * 100, "b")
        batches.refill(configure(outcome, batch_characters=5))
        assert queued() == [("a" * 100,), ("b",)]

    def test_duplicates_count_once_and_are_bound_together(self, outcome):
        ids = rows(outcome, "a", "a", "b", "a", "c")
        batches.refill(configure(outcome, batch_size=2))
        first = EmbeddingTask.objects.order_by("pk").first()
        assert batches.load(first.pk).row_ids == ((ids[0], ids[1], ids[3]), (ids[2],))
        assert first.text_count == 2

    def test_rows_of_an_unsettled_task_are_left_to_it(self, outcome):
        rows(outcome, *"abcd")
        configured = configure(outcome, batch_size=2)
        batches.refill(configured)
        task_queue.remove_held(dispatched(outcome), "X")
        assert batches.refill(configured) == 1
        assert queued() == [("c", "d"), ("a", "b")]

    def test_what_is_embedded_by_now_takes_that_vector(self, outcome):
        ids = rows(outcome, "a", "b")
        with transaction.atomic():
            store.write_vectors(outcome.repository_id, [(ids[0], vector_of("a", 4))])
        rows(outcome, "a", "a")
        batches.refill(configure(outcome))
        assert queued() == [("b",)]
        assert KnowledgeRow.objects.filter(text="a", vector=None).count() == 0
        assert RepositoryOutcome.objects.get(pk=outcome.pk).reused == 2

    def test_a_backlog_of_several_pages(self, outcome):
        rows(outcome, *(f"{number:03d}" for number in range(300)), *["same"] * 300)
        batches.refill(configure(outcome, batch_size=301))
        assert [len(texts) for texts in queued()] == [301]
        assert KnowledgeRow.objects.filter(task=None).count() == 0

    def test_refused_once_the_run_does_not_dispatch(self, outcome):
        rows(outcome, "a")
        TenantRun.objects.update(dispatch_allowed=False)
        with pytest.raises(DispatchNotAllowed):
            batches.refill(configure(outcome))
        assert KnowledgeRow.objects.filter(task=None).count() == 1

    def test_undeliverable_rows_are_not_chosen(self, outcome):
        rows(outcome, "a")
        KnowledgeRow.objects.update(undeliverable_reason="refused")
        assert batches.refill(configure(outcome)) == 0


class TestSplitting:
    def test_into_two_halves_of_one_root(self, outcome):
        rows(outcome, *"abcde")
        batches.refill(configure(outcome, batch_size=5))
        root = dispatched(outcome)
        assert batches.split(root, batches.load(root.id))
        assert queued() == [("a", "b"), ("c", "d", "e")]
        half = dispatched(outcome)
        assert (half.split_from_id, batches.root_id(half.id)) == (root.id, root.id)
        batches.split(half, batches.load(half.id))
        assert set(EmbeddingTask.objects.filter(state=TaskState.QUEUED).values_list("split_from", flat=True)) == {
            root.id
        }

    def test_halves_do_not_count_as_the_outcomes_share(self, outcome):
        rows(outcome, *"abcdefgh")
        configured = configure(outcome, batch_size=2)
        batches.refill(configured)
        root = dispatched(outcome)
        batches.split(root, batches.load(root.id))
        assert batches.refill(configured) == 1

    def test_a_holder_that_lost_its_lease_splits_nothing(self, outcome):
        rows(outcome, *"ab")
        batches.refill(configure(outcome))
        task = dispatched(outcome)
        batch = batches.load(task.id)
        EmbeddingTask.objects.update(lease_expires_at="2000-01-01T00:00Z")
        task_queue.reclaim(task.provider_id)
        assert not batches.split(task, batch)
        assert not batches.mark_undeliverable(task, batch, "refused")
        assert EmbeddingTask.objects.count() == 1

    def test_a_text_is_marked_undeliverable_with_all_its_rows(self, outcome):
        rows(outcome, "a", "a")
        batches.refill(configure(outcome))
        task = dispatched(outcome)
        assert batches.mark_undeliverable(task, batches.load(task.id), "refused")
        assert set(KnowledgeRow.objects.values_list("undeliverable_reason", "version__is_live")) == {("refused", True)}

    def test_something_landed_once_a_half_is_stored_or_the_control_text_passed(self, outcome):
        rows(outcome, *"ab")
        batches.refill(configure(outcome))
        root = dispatched(outcome)
        batches.split(root, batches.load(root.id))
        assert not batches.has_landed(root.id)
        half = dispatched(outcome)
        task_queue.settle(half)
        with transaction.atomic():
            task_queue.mark_stored(half)
        assert batches.has_landed(root.id)
