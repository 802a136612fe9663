"""What follows from a decision: totals, when a repository is due again, and how failures put it off."""

from datetime import timedelta

import pytest
from django.utils import timezone

from embeddings.models import Repository, RepositoryOutcome
from embeddings.runs import totals
from embeddings.states import OutcomeStatus
from tests.support.factories import make_outcome, make_repository, make_row, make_run, make_tenant, make_version

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]

S = OutcomeStatus


@pytest.fixture
def outcome():
    return make_outcome(make_run())


def decided(outcome, status, **values):
    RepositoryOutcome.objects.filter(pk=outcome.pk).update(status=status, **values)
    found = RepositoryOutcome.objects.select_related("repository", "run").get(pk=outcome.pk)
    totals.record(found)
    return Repository.objects.get(pk=outcome.repository_id)


class TestRecording:
    def test_totals_are_the_repositorys_rows(self, outcome):
        generation = outcome.run.generation
        live = make_version(outcome.repository, generation, is_live=True, row_count=2)
        make_row(live), make_row(live, undeliverable_reason="refused")
        make_version(outcome.repository, generation, row_count=0, skipped_reason="binary", is_live=True)
        elsewhere = make_repository(outcome.repository.tenant)
        make_row(make_version(elsewhere, generation))
        decided(outcome, S.DEFERRED, skipped={"symlink": 3})
        outcome.refresh_from_db()
        assert (outcome.files, outcome.rows, outcome.pending, outcome.undeliverable) == (1, 2, 1, 1)
        assert outcome.skipped == {"symlink": 3, "binary": 1}

    def test_happens_once(self, outcome):
        decided(outcome, S.FAILED)
        outcome.refresh_from_db()
        assert decided(outcome, S.FAILED).consecutive_failures == 1

    @pytest.mark.parametrize(
        ("status", "failures"),
        [
            (S.SUCCEEDED, 0),
            (S.UNCHANGED, 0),
            (S.FAILED, 3),
            (S.INTERRUPTED, 3),
            (S.DEFERRED, 2),
            (S.CANCELLED, 2),
        ],
    )
    def test_every_end_sets_when_it_is_due_again(self, outcome, status, failures):
        Repository.objects.update(consecutive_failures=2)
        repository = decided(outcome, status, revision="abc")
        assert repository.consecutive_failures == failures
        assert repository.next_due_at > timezone.now() + timedelta(minutes=29)
        assert repository.indexed_revision == ("abc" if failures == 0 else "")

    def test_one_that_was_skipped_leaves_the_schedule_alone(self, outcome):
        assert decided(outcome, S.SKIPPED).next_due_at is None


class TestNextDue:
    @pytest.fixture
    def repository(self):
        return make_repository(make_tenant(), cadence_minutes=30)

    @pytest.mark.parametrize(("failures", "minutes"), [(0, 30), (1, 60), (2, 120), (3, 120), (99, 120)])
    def test_is_the_cadence_doubled_by_each_failure_up_to_two_hours(self, repository, failures, minutes):
        wait = totals.due_in(repository, failures)
        assert timedelta(minutes=minutes) <= wait <= timedelta(minutes=minutes * 1.1)

    def test_a_cadence_over_two_hours_is_not_shortened_by_failures(self, repository):
        repository.cadence_minutes = 600
        assert totals.due_in(repository, 5) >= timedelta(minutes=600)

    def test_the_jitter_is_a_repositorys_own_and_always_the_same(self, repository):
        assert totals.due_in(repository, 0) == totals.due_in(repository, 0)
        waits = {totals.due_in(make_repository(repository.tenant), 0) for _ in range(5)}
        assert len(waits) > 1
