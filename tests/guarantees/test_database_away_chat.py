"""G14 for chat: a turn streams on while its database is away, and its end is stored once (docs/outages.md).

It brings a PostgreSQL of its own, and so runs once, whatever database the run is tried on.
"""

import contextlib
import time

import openai
import pytest
from django.conf import settings

from project.runtime.embedded import hold_valkey
from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TurnState
from tests.support.chat_stack import ChatStack, chat_at
from tests.support.factories import make_provider
from tests.support.processes import start_web, start_worker
from tests.support.provider_server import D, F, Gate, ProviderServer, R, T, at_gate, sse
from tests.support.restartable_postgres import as_default_database
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)
ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "Why?"}]}
# The lease outlives the outage, as the default of 60 s does.
PATIENT = {"LEASE_MS": "15000", "LEASE_RENEW_MS": "1000", "CHAT_HEARTBEAT_MS": "300"}


@pytest.fixture(scope="module")
def postgres(django_db_blocker):
    hold_valkey(settings.VAR_DIR)
    with django_db_blocker.unblock(), as_default_database() as postgres:
        yield postgres


@pytest.fixture(scope="module")
def stack(postgres):
    with contextlib.ExitStack() as ending:
        worker = start_worker("worker-away", **PATIENT)
        ending.callback(worker.end)
        web, address = start_web("web-away", **PATIENT)
        ending.callback(web.end)
        yield ChatStack(address, web, worker)


@pytest.fixture
def chat(stack):
    with ProviderServer() as server:
        budgets = {"request_timeout_ms": 30_000, "stream_idle_timeout_ms": 30_000}
        provider = make_provider(base_url=server.openai_url, chat_model="scripted", **budgets)
        with chat_at(stack, provider, server) as chat:
            yield chat


def texts_of(stream):
    for chunk in stream:
        if text := chunk.choices[0].delta.content:
            yield text


def away_in_mid_answer(postgres, chat, seconds):
    """Asks, takes the database away after the first words, reads on, and brings it back: the words, and what follows."""
    before, after = Gate(), Gate()
    chat.server.next(sse(R, T("Half"), at_gate(before), T(" of it"), at_gate(after), T(" and the rest"), F, D))
    stream = texts_of(chat.openai(timeout=90.0).chat.completions.create(**ASKED, stream=True))
    said = next(stream)
    before.wait_arrived(timeout=30)
    postgres.stop()
    before.release()
    said += next(stream)
    after.wait_arrived(timeout=30)
    after.release()
    # The outage itself: the answer ends meanwhile.
    time.sleep(seconds)
    postgres.start()
    return said, "".join(stream)


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_a_turn_streams_on_and_its_end_is_stored(postgres, chat, seconds):
    said, rest = away_in_mid_answer(postgres, chat, seconds)
    assert (said, rest) == ("Half of it", " and the rest")
    turn = ChatTurn.objects.latest("id")
    assert (turn.state, turn.answer) == (TurnState.COMPLETED, "Half of it and the rest")
    assert (ChatAttempt.objects.filter(turn=turn).count(), len(chat.server.chat_calls)) == (1, 1)


def test_a_request_while_the_database_is_away_is_told_to_come_again(postgres, chat):
    client = chat.openai()
    postgres.stop()
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(**ASKED)
    postgres.start()
    assert (refused.value.status_code, refused.value.code) == (503, "database_unavailable")
    assert refused.value.response.headers["retry-after"] == "2"
    assert not ChatTurn.objects.filter(tenant=chat.tenant).exists()


def test_a_hang_up_while_the_database_is_away_ends_the_turn_once_it_is_back(postgres, chat):
    gate = Gate()
    chat.server.next(sse(R, T("Half"), at_gate(gate), T(" more"), F, D))
    with chat.openai().chat.completions.create(**ASKED, stream=True) as stream:
        assert next(texts_of(stream)) == "Half"
        gate.wait_arrived(timeout=30)
        postgres.stop()
    time.sleep(0.5)
    postgres.start()
    eventually(lambda: ChatTurn.objects.latest("id").cancel_requested_at, timeout=30, message="the cancel arrives")
    eventually(lambda: ChatTurn.objects.latest("id").has_ended, timeout=30, message="the turn ends")
    assert ChatTurn.objects.latest("id").state == TurnState.CANCELLED
    gate.release()
