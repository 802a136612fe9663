"""G12 on every endpoint: two tenants with the same slugs and paths on one provider; nothing of one is the other's."""

import pytest

from embeddings.models import RepositoryOutcome
from embeddings.registry import KeyScope, issue_key
from embeddings.states import CircuitState, OutcomeStatus, RunStatus
from streaming.http import turn_requests
from streaming.models import ChatTurn
from streaming.states import TurnState
from tests.support.factories import (
    make_generation,
    make_outcome,
    make_repository,
    make_row,
    make_run,
    make_tenant,
    make_version,
)
from tests.support.provider_server import Gate, gated, vector_of


@pytest.fixture
def rival(chat):
    """Another tenant of the same provider, as an HTTP client with its own key."""
    tenant = make_tenant(embedding_provider=chat.provider, chat_provider=chat.provider)
    _, key = issue_key(tenant)
    with chat.http(key) as client:
        client.tenant = tenant
        yield client


def index(tenant, text):
    generation = make_generation(tenant.embedding_provider, dimensions=384)
    repository = make_repository(tenant, slug="docs", live_generation=generation, knowledge_revision=1)
    version = make_version(repository, generation, path="README.md", is_live=True, row_count=1)
    make_row(version, text=text, vector=vector_of(text))
    return repository


@pytest.mark.parametrize("path", ["", "/events", "/cancel"])
def test_a_turn(chat, rival, path):
    gate = Gate()
    chat.server.script(lambda call: gated(gate))
    turn = chat.take()
    method = "POST" if path == "/cancel" else "GET"
    reply = rival.request(method, f"/api/chat/turns/{turn['id']}{path}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert chat.turn(turn["id"]).cancel_requested_at is None
    gate.release()
    assert chat.wait_ended(turn["id"]).state == TurnState.COMPLETED


def test_its_twin_a_lookup_without_the_tenant_gives_it_away(chat, rival, client, monkeypatch):
    turn = chat.take()
    chat.wait_ended(turn["id"])
    path, headers = f"/api/chat/turns/{turn['id']}", {"Authorization": rival.headers["Authorization"]}
    assert client.get(path, headers=headers).status_code == 404
    monkeypatch.setattr(turn_requests, "find_turn", lambda tenant, public_id: ChatTurn.objects.get(public_id=public_id))
    assert client.get(path, headers=headers).json()["answer"] == "The gates hold."


def test_the_owner_may(chat, rival):
    turn = chat.take()
    chat.wait_ended(turn["id"])
    with chat.http() as client:
        assert client.get(f"/api/chat/turns/{turn['id']}").status_code == 200
        assert client.post(f"/api/chat/turns/{turn['id']}/cancel").status_code == 200


def test_a_conversation(chat, rival):
    turn = chat.take(conversation="new")
    chat.wait_ended(turn["id"])
    body = {"messages": [{"role": "user", "content": "?"}], "conversation": turn["conversation"], "knowledge": False}
    assert rival.post("/api/chat/turns", json=body).status_code == 404
    assert ChatTurn.objects.count() == 1


def test_search_and_answers_over_knowledge(chat, rival):
    text = "The very same words."
    index(chat.tenant, text)
    mine = index(rival.tenant, text)
    make_row(mine.files.get().versions.get(), text="Only the rival has this.", vector=vector_of("secret"), ordinal=7)
    with chat.http() as client:
        found = client.get("/api/search", params={"q": "secret", "limit": 50}).json()["results"]
        assert [hit["text"] for hit in found] == [text]
    found = rival.get("/api/search", params={"q": "secret"}).json()["results"]
    assert [hit["text"] for hit in found] == ["Only the rival has this.", text]
    turn = chat.take("secret", knowledge=True)
    chat.wait_ended(turn["id"])
    assert "Only the rival" not in str(chat.server.chat_calls[-1].body)


def shared_run(chat, rival):
    """One run over both tenants' `docs`: the rival's opened the circuit."""
    run = make_run(chat.provider, status=RunStatus.RUNNING)
    run.circuit.state, run.circuit.opened_by = CircuitState.OPEN, f"{rival.tenant}/docs"
    run.circuit.reason_code = "KB_VECTOR_EMBED_PROVIDER_TIMEOUT"
    run.circuit.save()
    mine = make_outcome(run, make_repository(chat.tenant, slug="docs"), status=OutcomeStatus.PENDING)
    others = make_outcome(run, make_repository(rival.tenant, slug="docs"), status=OutcomeStatus.PENDING)
    return run, mine, others


def test_a_run_is_ones_own_outcomes_and_the_circuits_state_and_code(chat, rival):
    run, _, _ = shared_run(chat, rival)
    with chat.http() as client:
        shown = client.get(f"/api/runs/{run.public_id}").json()
        assert client.get("/api/runs").json()["runs"] == [shown]
    assert [(outcome["tenant"], outcome["repository"]) for outcome in shown["outcomes"]] == [(chat.tenant.slug, "docs")]
    assert shown["circuit"] == {
        "state": "open",
        "reason_code": "KB_VECTOR_EMBED_PROVIDER_TIMEOUT",
        "source_error_code": "",
    }
    assert rival.tenant.slug not in str(shown)


def test_a_run_without_a_part_of_ones_own(chat, rival):
    run = make_run(chat.provider)
    make_outcome(run, make_repository(chat.tenant, slug="docs"))
    assert rival.get(f"/api/runs/{run.public_id}").status_code == 404
    assert rival.post(f"/api/runs/{run.public_id}/cancel").status_code == 404
    assert rival.get("/api/runs").json() == {"runs": []}


def test_a_cancel_takes_ones_own_outcomes_only(chat, rival):
    run, mine, others = shared_run(chat, rival)
    with chat.http() as client:
        shown = client.post(f"/api/runs/{run.public_id}/cancel").json()
    assert [outcome["status"] for outcome in shown["outcomes"]] == ["cancelled"]
    mine.refresh_from_db()
    others.refresh_from_db()
    assert (mine.status, others.status) == (OutcomeStatus.CANCELLED, OutcomeStatus.PENDING)


def test_a_sweep_takes_ones_own_repositories_only(chat, rival):
    make_repository(chat.tenant, slug="docs")
    make_repository(rival.tenant, slug="docs")
    make_repository(rival.tenant, slug="plans")
    with chat.http() as client:
        started = client.post("/api/runs", json={}).json()["runs"]
        named = client.post("/api/runs", json={"repositories": ["plans"]})
        sneaky = client.post("/api/runs", json={"repositories": [f"../{rival.tenant.slug}/plans"]})
    assert [outcome["tenant"] for run in started for outcome in run["outcomes"]] == [chat.tenant.slug]
    assert (named.status_code, sneaky.status_code) == (400, 400)
    assert "plans" not in named.json()["error"]["message"].replace("'plans'", "").replace("repository plans", "")
    assert not RepositoryOutcome.objects.filter(repository__tenant=rival.tenant).exists()


def test_limits_are_counted_for_each_tenant(chat, rival):
    gate = Gate()
    chat.server.script(lambda call: gated(gate))
    turns = [chat.take() for _ in range(6)]
    body = {"messages": [{"role": "user", "content": "?"}], "knowledge": False}
    others = rival.post("/api/chat/turns", json=body)
    assert others.status_code == 201
    gate.release()
    for turn in [*turns, others.json()]:
        chat.wait_ended(turn["id"])


def test_models_and_embeddings_are_those_of_the_tenants_own_provider(chat):
    tenant = make_tenant()
    _, key = issue_key(tenant)
    with chat.http(key) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["embed"]
    assert chat.server.calls == []


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/v1/chat/completions", KeyScope.CHAT),
        ("GET", "/v1/models", KeyScope.CHAT),
        ("POST", "/v1/embeddings", KeyScope.SEARCH),
        ("POST", "/api/chat/turns", KeyScope.CHAT),
        ("GET", "/api/chat/turns/9b0fb9d2-6f8e-4b8e-8d0a-0d4a4f2b8a11", KeyScope.CHAT),
        ("GET", "/api/chat/turns/9b0fb9d2-6f8e-4b8e-8d0a-0d4a4f2b8a11/events", KeyScope.CHAT),
        ("POST", "/api/chat/turns/9b0fb9d2-6f8e-4b8e-8d0a-0d4a4f2b8a11/cancel", KeyScope.CHAT),
        ("GET", "/api/search?q=x", KeyScope.SEARCH),
        ("GET", "/api/runs", KeyScope.RUNS),
        ("POST", "/api/runs", KeyScope.RUNS),
        ("GET", "/api/runs/9b0fb9d2-6f8e-4b8e-8d0a-0d4a4f2b8a11", KeyScope.RUNS),
        ("POST", "/api/runs/9b0fb9d2-6f8e-4b8e-8d0a-0d4a4f2b8a11/cancel", KeyScope.RUNS),
    ],
)
def test_every_endpoint_wants_a_key_with_its_scope(chat, method, path, scope):
    _, other = issue_key(chat.tenant, scopes=[each for each in KeyScope if each != scope])
    with chat.http("sgk_nonsense") as client:
        assert client.request(method, path).status_code == 401
        client.headers.pop("Authorization")
        assert client.request(method, path).status_code == 401
    with chat.http(other) as client:
        assert client.request(method, path).status_code == 403
