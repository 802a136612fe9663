"""A new operator's first steps: removed tenants, missing sources, the API's documentation."""

import re

import openai
import pytest
from django.utils import timezone

from embeddings import registry
from embeddings.doctor.findings import Status, examine
from embeddings.doctor.sweeps import check_repositories
from embeddings.models import TenantRun
from embeddings.states import OutcomeStatus
from streaming.models import ChatTurn
from streaming.states import TurnState
from streaming.turns import claims, transitions
from tests.streaming.turns.test_transitions import new_turn
from tests.support.commanding import manage
from tests.support.factories import make_outcome, make_repository, make_run, make_tenant
from tests.support.provider_server import R, T, silence_forever, sse
from tests.support.waiting import PROMPTLY_S, eventually


class TestARemovedTenant:
    @pytest.mark.parametrize("command", [("chat", "zed", "hi"), ("search", "zed", "hi"), ("sweep", "--tenant", "zed")])
    def test_is_served_by_no_command(self, transactional_db, command):
        registry.remove_tenant(make_tenant(slug="zed"))
        ended = manage(*command)
        assert (ended.status, ended.out) == (2, "")
        assert "Tenant zed is not active: `manage.py tenant add zed` brings it back." in ended.err
        assert (ChatTurn.objects.count(), TenantRun.objects.count()) == (0, 0)

    def test_has_its_turns_cancelled_and_nobody_else_s(self, db):
        gone, other = (make_tenant(slug=slug) for slug in ("gone", "other"))
        for tenant in (gone, other):
            tenant.chat_provider = tenant.embedding_provider
        rows = [transitions.take(new_turn(tenant)) for tenant in (gone, other)]
        with claims.held(transitions.claim(rows[0])) as mine, claims.held(transitions.claim(rows[1])) as theirs:
            claims.check_all()
            assert (mine.is_cancelled, theirs.is_cancelled) == (False, False)
            registry.remove_tenant(gone)
            claims.check_all()
            assert (mine.is_cancelled, theirs.is_cancelled) == (True, False)

    def test_closes_the_socket_of_a_stream_at_the_provider(self, chat):
        # Far longer than the removal takes: the watchdog must not be what closes the socket.
        chat.provider.stream_idle_timeout_ms = 30_000
        chat.provider.save()
        chat.server.next(sse(R, T("Hello"), silence_forever()))
        stream = chat.openai().chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "?"}], stream=True
        )
        next(stream)
        registry.remove_tenant(chat.tenant)
        with pytest.raises(openai.APIError):
            list(stream)
        assert chat.server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"
        eventually(lambda: ChatTurn.objects.get().state == TurnState.CANCELLED)


@pytest.mark.both_databases
def test_a_source_that_cannot_be_fetched_is_named_although_it_is_no_failure(transactional_db):
    tenant = make_tenant(slug="acme")
    docs, sound, empty = (
        make_repository(tenant, slug=slug, next_due_at=timezone.now()) for slug in ("docs", "sound", "empty")
    )
    run = make_run(tenant.embedding_provider)
    make_outcome(run, docs, status=OutcomeStatus.DEFERRED, error_code="KB_SOURCE_UNREACHABLE")
    make_outcome(run, sound, status=OutcomeStatus.SUCCEEDED)
    make_outcome(run, empty, status=OutcomeStatus.DEFERRED, error_code="KB_SOURCE_EMPTY")
    (line,) = examine([check_repositories])
    assert (line.status, line.name) == (Status.WARNING, "repository acme/docs")
    assert line.detail == "deferred (KB_SOURCE_UNREACHABLE)"
    make_outcome(make_run(tenant.embedding_provider), docs, status=OutcomeStatus.SUCCEEDED)
    assert [line.status for line in examine([check_repositories])] == [Status.OK]


def test_the_documentation_of_the_api_loads_nothing_from_elsewhere(chat):
    with chat.http() as client:
        page = client.get("/api/docs").text
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(loaded) >= 3
        for address in loaded:
            assert address.startswith("/"), address
            assert client.get(address).status_code == 200, address
