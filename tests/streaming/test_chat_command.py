"""`manage.py chat`: runs its turn itself, without any worker; text as it arrives, sources, exit status, Ctrl-C."""

import json
import signal
import subprocess
import sys

import pytest

from streaming.models import ChatTurn
from streaming.states import TurnOrigin, TurnState
from tests.support.commanding import manage
from tests.support.factories import make_generation, make_provider, make_repository, make_row, make_tenant, make_version
from tests.support.processes import CHECKOUT, process_environ
from tests.support.provider_server import ProviderServer, status, vector_of
from tests.support.provider_server.chat_stream import D, F, R, T, silence_forever, sse
from tests.support.waiting import PROMPTLY_S, eventually

TEXT = "The gates hold back the flood."


@pytest.fixture
def server(transactional_db):
    with ProviderServer() as server:
        yield server


@pytest.fixture
def tenant(server):
    provider = make_provider(base_url=server.openai_url, stream_idle_timeout_ms=400, request_timeout_ms=2_000)
    tenant = make_tenant(slug="acme", embedding_provider=provider, chat_provider=provider)
    generation = make_generation(provider, dimensions=384)
    repository = make_repository(tenant, slug="docs", live_generation=generation, knowledge_revision=1)
    version = make_version(repository, generation, path="gates.md", is_live=True, row_count=1)
    make_row(version, text=TEXT, vector=vector_of(TEXT), start_line=3, end_line=9)
    return tenant


def test_the_answer_and_its_numbered_sources(server, tenant):
    ended = manage("chat", "acme", TEXT)
    assert (ended.status, ended.out) == (0, "The gates hold.\n[1] docs gates.md:3-9\n")
    turn = ChatTurn.objects.get()
    assert (turn.state, turn.origin, turn.uses_knowledge) == (TurnState.COMPLETED, TurnOrigin.COMMAND, True)
    assert TEXT in server.chat_calls[0].body["messages"][0]["content"]


def test_without_knowledge(server, tenant):
    ended = manage("chat", "acme", "Why?", "--no-knowledge")
    assert (ended.status, ended.out) == (0, "The gates hold.\n")
    assert server.embedding_calls == []


def test_as_json(server, tenant):
    ended = manage("chat", "acme", TEXT, "--json")
    assert ended.status == 0
    turn = ChatTurn.objects.get()
    assert ended.json == {
        "turn": str(turn.public_id),
        "state": "completed",
        "answer": "The gates hold.",
        "error_code": "",
        "attempts": [
            {
                "number": 1,
                "end_state": "completed",
                "error_kind": "",
                "chunks": ended.json["attempts"][0]["chunks"],
                "bytes": ended.json["attempts"][0]["bytes"],
            }
        ],
        "sources": [
            {"number": 1, "repository": "docs", "path": "gates.md", "start_line": 3, "end_line": 9, "score": 1.0}
        ],
    }
    assert ended.json["attempts"][0]["chunks"] > 0


def test_an_answer_that_breaks_off_is_kept_and_is_no_success(server, tenant, settings):
    server.next(sse(R, T("Half of it"), silence_forever()))
    ended = manage("chat", "acme", "Why?", "--no-knowledge", "--json")
    assert ended.status == 1
    assert (ended.json["state"], ended.json["answer"]) == ("idle_timeout", "Half of it")
    assert "idle_timeout: ETIMEDOUT" in ended.err


def test_a_second_attempt_is_told_beside_the_answer(server, tenant, settings):
    settings.CHAT_RETRY_BASE_MS = 1
    server.next(status(503), sse(R, T("At last."), F, D))
    ended = manage("chat", "acme", "Why?", "--no-knowledge")
    assert (ended.status, ended.out) == (0, "At last.\n")
    assert "attempt 2" in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nobody", "Why?"), "nobody"),
        (("acme", "  "), "the question is empty"),
        (("mute", "Why?"), "no chat provider"),
    ],
)
def test_what_cannot_be_asked(server, tenant, arguments, said):
    make_tenant(slug="mute")
    ended = manage("chat", *arguments)
    assert ended.status == 2
    assert said in ended.err
    assert not ChatTurn.objects.exists()


def test_ctrl_c_cancels_upstream(server, tenant):
    type(tenant.chat_provider).objects.update(stream_idle_timeout_ms=30_000)
    server.next(sse(R, T("One"), silence_forever()))
    command = [sys.executable, "manage.py", "chat", "acme", "Why?", "--no-knowledge", "--json"]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env=process_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    server.wait_for_calls(1, timeout=30)
    eventually(lambda: ChatTurn.objects.filter(stage="streaming").exists())
    process.send_signal(signal.SIGINT)
    assert server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert json.loads(out)["state"] == "cancelled"
    assert ChatTurn.objects.get().state == TurnState.CANCELLED


def test_a_key_that_is_not_set_is_named(server, tenant):
    type(tenant.chat_provider).objects.update(api_key_env="SLUICEGATE_KEY_NOWHERE")
    ended = manage("chat", "acme", "Why?", "--no-knowledge", "--json")
    assert (ended.status, ended.json["error_code"]) == (1, "PROVIDER_CONFIGURATION")
    assert "SLUICEGATE_KEY_NOWHERE" in ended.err
    assert server.calls == []
