"""First texts first: an answer that floods pauses while another turn of the process waits for its first text."""

import time

import pytest
from django.conf import settings

from project.embedded import hold_valkey
from streaming import giving_way
from streaming.models import ChatTurn
from streaming.states import TurnOrigin
from streaming.tasks import run_turn
from tests.chat_stack import in_thread
from tests.factories import make_provider, make_tenant
from tests.provider_server import Gate, ProviderServer
from tests.provider_server.chat_stream import D, F, R, T, at_gate, repeat, sse
from tests.waiting import eventually

SHARES = 2


@pytest.fixture
def server(transactional_db):
    hold_valkey(settings.VAR_DIR)
    with ProviderServer() as server:
        yield server


def taken(server):
    """A queued turn, without a ring: a worker that other tests have left running is not to come first."""
    provider = make_provider(base_url=server.openai_url, chat_model="scripted")
    request = {"messages": [{"role": "user", "content": "?"}]}
    tenant = make_tenant(chat_provider=provider)
    turn = ChatTurn.objects.create(
        tenant=tenant, provider=provider, model="scripted", origin=TurnOrigin.NATIVE, request=request
    )
    return str(turn.public_id)


def seconds_of_a_flood(server):
    server.next(sse(R, repeat(SHARES * giving_way.SHARE, T("x")), F, D))
    one = taken(server)
    began = time.monotonic()
    run_turn(one)
    assert ChatTurn.objects.get(public_id=one).answer == "x" * SHARES * giving_way.SHARE
    return time.monotonic() - began


def test_a_flood_pauses_after_each_share_while_another_turn_waits_for_its_first_text(server, monkeypatch):
    monkeypatch.setattr(giving_way, "PAUSE_S", 0.3)
    with giving_way.starting("another"):
        assert seconds_of_a_flood(server) >= SHARES * 0.3


def test_its_twin_with_nobody_waiting_it_does_not(server, monkeypatch):
    monkeypatch.setattr(giving_way, "PAUSE_S", 10.0)
    assert seconds_of_a_flood(server) < 10.0


def test_a_turn_waits_until_its_first_text_and_no_longer(server):
    before, after = Gate(), Gate()
    server.next(sse(R, at_gate(before), T("first"), at_gate(after), F, D))
    one = taken(server)
    ended = in_thread(run_turn, one)
    before.wait_arrived()
    assert one in giving_way._starting
    before.release()
    after.wait_arrived()
    eventually(lambda: one not in giving_way._starting, message="its first text is there")
    after.release()
    ended()
    assert not giving_way._starting


def test_a_turn_that_fails_or_is_nobodys_waits_for_nothing_more(server):
    run_turn("00000000-0000-0000-0000-000000000000")
    server.next(sse(D))
    server.next(sse(D))
    server.next(sse(D))
    run_turn(taken(server))
    assert not giving_way._starting
