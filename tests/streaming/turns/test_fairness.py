"""Starts first: an answer that floods pauses after every few deltas in the moment after a start."""

import time

import pytest
from django.conf import settings

from project.runtime.embedded import hold_valkey
from streaming.models import ChatTurn
from streaming.states import TurnOrigin, TurnState
from streaming.tasks import run_turn
from streaming.turns import fairness
from tests.support.factories import make_provider, make_tenant
from tests.support.provider_server import Gate, ProviderServer
from tests.support.provider_server.chat_stream import D, F, R, T, at_gate, repeat, sse
from tests.support.threads import in_thread
from tests.support.waiting import eventually

SHARES = 2
LONG_AGO = float("-inf")


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


def seconds_of_a_flood(server, meanwhile):
    """How long an answer's flood takes after its first text, when `meanwhile` was called."""
    first = Gate()
    server.next(sse(R, T("first"), at_gate(first), repeat(SHARES * fairness.SHARE, T("x")), F, D))
    one = taken(server)
    ended = in_thread(run_turn, one)
    first.wait_arrived()
    eventually(lambda: ChatTurn.objects.get(public_id=one).state == TurnState.RUNNING, message="it runs")
    fairness._started_at[0] = LONG_AGO
    meanwhile()
    began = time.monotonic()
    first.release()
    ended()
    assert ChatTurn.objects.get(public_id=one).answer == "first" + "x" * SHARES * fairness.SHARE
    return time.monotonic() - began


def start_of_another():
    run_turn("00000000-0000-0000-0000-000000000000")


def test_a_flood_pauses_after_each_share_in_the_moment_after_a_start(server, monkeypatch):
    monkeypatch.setattr(fairness, "PAUSE_S", 0.3)
    monkeypatch.setattr(fairness, "MOMENT_S", 60.0)
    assert seconds_of_a_flood(server, start_of_another) >= SHARES * 0.3


def test_its_twin_without_a_start_it_does_not(server, monkeypatch):
    monkeypatch.setattr(fairness, "PAUSE_S", 10.0)
    monkeypatch.setattr(fairness, "MOMENT_S", 60.0)
    assert seconds_of_a_flood(server, lambda: None) < 10.0


def test_the_moment_passes_whatever_has_become_of_the_start(server, monkeypatch):
    monkeypatch.setattr(fairness, "PAUSE_S", 10.0)
    monkeypatch.setattr(fairness, "MOMENT_S", 0.0)
    assert seconds_of_a_flood(server, start_of_another) < 10.0
