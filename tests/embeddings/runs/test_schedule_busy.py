"""The schedule while a run by hand is at work on all that is due."""

from datetime import timedelta

import pytest
from django.utils import timezone

from embeddings.models import TenantRun
from embeddings.runs import schedule, sweep
from embeddings.states import OutcomeStatus, RunStatus, RunTrigger
from tests.support.factories import make_repository, make_tenant

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def by_hand():
    tenant = make_tenant()
    (run,) = sweep.start([make_repository(tenant), make_repository(tenant)], trigger=RunTrigger.COMMAND)
    return run


def test_no_run_is_started_that_could_only_skip(by_hand):
    assert schedule.start_due() == []
    assert TenantRun.objects.get() == by_hand


def test_one_that_nobody_attends_is_ended_and_its_repositories_are_taken(by_hand):
    TenantRun.objects.update(alive_until=timezone.now() - timedelta(seconds=1))
    (run,) = schedule.start_due()
    assert set(run.outcomes.values_list("status", flat=True)) == {OutcomeStatus.PENDING}
    by_hand.refresh_from_db()
    assert by_hand.status == RunStatus.INTERRUPTED


def test_one_more_that_is_due_is_not_held_up(by_hand):
    make_repository(make_tenant(embedding_provider=by_hand.provider))
    (run,) = schedule.start_due()
    assert sorted(run.outcomes.values_list("status", flat=True)) == ["pending", "skipped", "skipped"]
