"""The schedule: what is due, and one run for each provider over all of it."""

from datetime import timedelta

import pytest
from django.utils import timezone

from embeddings.models import Provider, Repository, TenantRun
from embeddings.runs import schedule, sweep
from embeddings.states import RunTrigger
from tests.support.factories import make_provider, make_repository, make_tenant

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def tenant():
    return make_tenant()


def due(provider):
    return {repository.slug for repository in schedule.due_repositories(provider)}


class TestDue:
    def test_those_never_swept_and_those_whose_time_has_come(self, tenant):
        now = timezone.now()
        make_repository(tenant, slug="never")
        make_repository(tenant, slug="past", next_due_at=now - timedelta(seconds=1))
        make_repository(tenant, slug="future", next_due_at=now + timedelta(minutes=1))
        make_repository(tenant, slug="disabled", enabled=False)
        make_repository(tenant, slug="removed", removed_at=now)
        make_repository(make_tenant(embedding_provider=tenant.embedding_provider, is_active=False), slug="inactive")
        make_repository(slug="elsewhere")
        assert due(tenant.embedding_provider) == {"never", "past"}


class TestStarting:
    def test_one_run_takes_all_that_are_due(self, tenant):
        chosen = {
            make_repository(tenant).pk,
            make_repository(make_tenant(embedding_provider=tenant.embedding_provider)).pk,
        }
        (run,) = schedule.start_due()
        assert run.trigger == RunTrigger.SCHEDULE
        assert set(run.outcomes.values_list("repository", flat=True)) == chosen

    def test_none_while_a_scheduled_one_is_unfinished(self, tenant):
        make_repository(tenant)
        (run,) = schedule.start_due()
        make_repository(tenant)
        assert schedule.start_due() == []
        sweep.request_cancel(run)
        (following,) = schedule.start_due()
        assert following.outcomes.count() == 1

    def test_one_for_each_provider(self, tenant):
        make_repository(tenant), make_repository()
        assert len(schedule.start_due()) == 2

    def test_a_run_by_hand_does_not_hold_it_up(self, tenant):
        first = make_repository(tenant)
        sweep.start([first], trigger=RunTrigger.COMMAND)
        make_repository(tenant)
        (run,) = schedule.start_due()
        assert sorted(run.outcomes.values_list("status", flat=True)) == ["pending", "skipped"]

    @pytest.mark.parametrize("values", [{"is_paused": True}, {"embedding_model": ""}])
    def test_none_for_a_provider_that_cannot_take_it(self, tenant, values):
        make_repository(tenant)
        Provider.objects.update(**values)
        assert schedule.start_due() == []

    def test_nothing_due_starts_nothing(self, tenant):
        make_repository(tenant)
        Repository.objects.update(next_due_at=timezone.now() + timedelta(hours=1))
        make_provider()
        assert schedule.start_due() == []
        assert not TenantRun.objects.exists()
