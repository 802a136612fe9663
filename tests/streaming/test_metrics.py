"""`/metrics`, `/healthz` and `/readyz`: computed from the rows, the same on every process, closed to strangers."""

from datetime import timedelta

import pytest
from django.test import RequestFactory
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from embeddings.states import CircuitState
from streaming import metrics
from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TurnState
from tests.support.factories import make_outcome, make_provider, make_run, make_task, make_tenant


def samples():
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics._text().decode())
        for sample in family.samples
    }


def make_turn(tenant, state, *attempts, **fields):
    turn = ChatTurn.objects.create(
        tenant=tenant, provider=tenant.chat_provider, model="m", request={"messages": []}, state=state, **fields
    )
    for number, values in enumerate(attempts, start=1):
        ChatAttempt.objects.create(turn=turn, number=number, started_at=timezone.now(), **values)
    return turn


@pytest.fixture
def tenant(db):
    return make_tenant(slug="secret-tenant", chat_provider=make_provider())


def test_turns_and_attempts_and_firings(tenant):
    stalled = {"end_state": "idle_timeout", "error_kind": "silent"}
    make_turn(tenant, TurnState.COMPLETED, stalled, {"end_state": "completed", "first_content_ms": 120})
    make_turn(tenant, TurnState.IDLE_TIMEOUT, stalled | {"longest_gap_ms": 3_000, "first_content_ms": 80})
    make_turn(tenant, TurnState.RUNNING)
    found = samples()
    assert found["sluicegate_chat_turns_total", (("state", "completed"),)] == 1
    assert found["sluicegate_chat_turns_total", (("state", "idle_timeout"),)] == 1
    assert found["sluicegate_chat_turns_total", (("state", "protocol_error"),)] == 0
    assert found["sluicegate_chat_turns_active", (("state", "running"),)] == 1
    assert found["sluicegate_chat_attempts_total", (("kind", "silent"), ("state", "idle_timeout"))] == 2
    assert found["sluicegate_chat_watchdog_firings_total", (("kind", "silent"),)] == 2
    assert found["sluicegate_chat_first_content_seconds_bucket", (("le", "0.1"),)] == 1
    assert found["sluicegate_chat_first_content_seconds_bucket", (("le", "0.25"),)] == 2
    assert found["sluicegate_chat_first_content_seconds_sum", ()] == pytest.approx(0.2)
    assert found["sluicegate_chat_longest_gap_seconds_bucket", (("le", "2.5"),)] == 0
    assert found["sluicegate_chat_longest_gap_seconds_count", ()] == 1


def test_the_lane_and_the_circuits(tenant):
    run = make_run(tenant.embedding_provider)
    make_task(make_outcome(run), queued_at=timezone.now() - timedelta(seconds=30))
    run.circuit.state, run.circuit.source_error_code = CircuitState.OPEN, "ETIMEDOUT"
    run.circuit.save()
    found = samples()
    lane = (("priority", "batch"), ("provider", tenant.embedding_provider.name))
    assert found["sluicegate_lane_depth", lane] == 1
    assert 30 <= found["sluicegate_lane_oldest_wait_seconds", lane] < 60
    assert found["sluicegate_circuits_opened_total", (("source", "ETIMEDOUT"),)] == 1


def test_no_tenant_is_named(tenant):
    make_turn(tenant, TurnState.COMPLETED)
    assert "secret-tenant" not in metrics._text().decode()


@pytest.mark.parametrize(
    ("address", "headers", "token", "allowed"),
    [
        ("127.0.0.1", {"Host": "127.0.0.1:8000"}, "", True),
        ("127.0.0.1", {"Host": "localhost"}, "", True),
        ("::1", {"Host": "[::1]:8000"}, "", True),
        ("127.0.0.1", {"Host": "gate.example.com"}, "", False),
        ("127.0.0.1", {"Host": "[::1"}, "", False),
        ("127.0.0.1", {"Host": "localhost", "Via": "1.1 proxy"}, "", False),
        ("127.0.0.1", {"Host": "localhost"}, "right", False),
        ("127.0.0.1", {"Host": "localhost", "Authorization": "Bearer wrong"}, "right", False),
        ("10.0.0.9", {}, "", False),
        ("127.0.0.1", {"Host": "localhost", "X-Forwarded-For": "10.0.0.9"}, "", False),
        ("", {}, "", False),
        ("10.0.0.9", {}, "right", False),
        ("10.0.0.9", {"Authorization": "Bearer wrong"}, "right", False),
        ("10.0.0.9", {"Authorization": "Bearer right"}, "right", True),
        ("10.0.0.9", {"Authorization": "Bearer "}, "", False),
    ],
)
def test_strangers_need_the_token(settings, address, headers, token, allowed):
    settings.METRICS_TOKEN = token
    request = RequestFactory().get("/metrics", headers={"Host": "localhost"} | headers, REMOTE_ADDR=address)
    assert metrics._may_read(request) is allowed


def test_over_http(chat):
    turn = chat.take()
    chat.wait_ended(turn["id"])
    with chat.http() as client:
        assert 'sluicegate_chat_turns_total{state="completed"} 1.0' in client.get("/metrics").text
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json() == {"status": "ok", "database": True, "event_log": True}
        assert client.get("/api/docs").status_code == 200
