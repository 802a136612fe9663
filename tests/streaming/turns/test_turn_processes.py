"""Turns and the deaths of what runs them: real processes, killed, frozen, stopped and restarted in mid-stream."""

import contextlib
import os
import signal
import time

import openai
import pytest
from django.conf import settings
from django.db import connection, transaction

from embeddings.runtime import valkey as blocking
from project.celery import app
from project.runtime.embedded import hold_valkey
from streaming.log import valkey
from streaming.log.events import log_key
from streaming.models import ChatTurn
from streaming.states import TurnState
from streaming.turns.transitions import RUN_TURN
from tests.support.chat_stack import text_of
from tests.support.provider_server import Gate, gated
from tests.support.provider_server.chat_stream import D, F, R, T, at_gate, silence, silence_forever, sse, usage
from tests.support.threads import in_thread
from tests.support.waiting import PROMPTLY_S, eventually


@pytest.fixture
def patient(chat):
    """The same, with a watchdog that does not end what a test stops."""
    chat.provider.stream_idle_timeout_ms = chat.provider.request_timeout_ms = 30_000
    chat.provider.save()
    return chat


def begun(chat, reader, deltas=1):
    """Reads up to so many deltas."""
    came = []
    while len([event for event in came if event["event"] == "delta"]) < deltas:
        came.append(next(reader))
    return came


def test_a_worker_killed_in_mid_stream_and_then_none_at_all(patient):
    chat = patient
    chat.server.next(sse(R, T("One"), silence(0.05), T(" two"), silence_forever()))
    turn = chat.take()
    with chat.reading(turn["id"]) as reader:
        events = begun(chat, reader, 2)
        chat.stack.worker.kill()
        events += list(reader)
    assert (events[-1]["state"], events[-1]["error_code"]) == ("interrupted", "WORKER_LOST")
    row = chat.turn(turn["id"])
    assert (row.state, row.answer) == (TurnState.INTERRUPTED, "One two")
    assert [attempt.end_state for attempt in row.attempts.all()] == ["interrupted"]
    assert_no_worker_is_said_within_seconds(chat)
    # Its client was told, and nobody runs it again: whatever was delivered would come twice.
    chat.stack.restore()
    app.send_task(RUN_TURN, args=[turn["id"]])
    # The "no worker" of a moment ago counts for no turn that came after it.
    assert text_of(chat.events(turn_without_a_message(chat))) == "The gates hold."
    assert len(chat.server.chat_calls) == 2


def assert_no_worker_is_said_within_seconds(chat):
    asked = in_thread(lambda: ask(chat))
    end = chat.events(chat.take()["id"])[-1]
    assert (end["state"], end["error_code"]) == ("interrupted", "NO_WORKER")
    with pytest.raises(openai.InternalServerError) as refused:
        asked()
    assert (refused.value.status_code, refused.value.code) == (503, "no_worker")


def test_a_frozen_worker_that_comes_back_changes_and_appends_nothing(patient):
    chat = patient
    gate = Gate()
    chat.server.next(sse(R, T("One"), at_gate(gate), T(" too late"), F, D))
    turn = chat.take()
    pid = chat.stack.worker._process.pid
    with chat.reading(turn["id"]) as reader:
        events = begun(chat, reader)
        os.kill(pid, signal.SIGSTOP)
        try:
            events += list(reader)
        finally:
            gate.release()
            chat.server.wait_for_calls(1)
            os.kill(pid, signal.SIGCONT)
    assert events[-1]["error_code"] == "WORKER_LOST"
    eventually(lambda: f"turn={turn['id']} lost its claim" in chat.stack.worker.output, message="it noticed")
    row = chat.turn(turn["id"])
    assert (row.state, row.answer) == (TurnState.INTERRUPTED, "One")
    assert text_of(chat.events(turn["id"])) == "One"


def test_a_message_that_comes_again_runs_nothing_twice(patient):
    chat = patient
    gate = Gate()
    chat.server.script(lambda call: gated(gate))
    turn = chat.take()
    chat.server.wait_for_calls(1)
    app.send_task(RUN_TURN, args=[turn["id"]])
    other = chat.take()
    chat.server.wait_for_calls(2)
    gate.release()
    chat.wait_ended(turn["id"])
    app.send_task(RUN_TURN, args=[turn["id"]])
    chat.wait_ended(other["id"])
    assert chat.events(chat.take()["id"])[-1]["state"] == "completed"
    assert len(chat.server.chat_calls) == 3
    assert chat.turn(turn["id"]).attempts.count() == 1


def test_no_record_is_kept_of_a_turns_wake_up(chat):
    """Neither as it is handed over (`no_ack` of the queue), nor as its task begins (`streaming.turns.wake_ups`)."""
    with valkey.connect() as client:
        client.config_resetstat()
        chat.events(chat.take()["id"])
        commands = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert {"lpush", "brpop"} <= commands
    # Not `zadd`: kombu keeps its bindings with it, now and then.
    assert not {"hset", "zrem", "hdel"} & commands


def test_a_broker_that_says_nothing_holds_nobody_up(patient):
    chat = patient
    earlier = chat.take()
    chat.wait_ended(earlier["id"])
    with frozen_valkey(), chat.http() as client:
        began = time.monotonic()
        turn = chat.take()
        assert client.get(f"/api/chat/turns/{earlier['id']}").json()["state"] == "completed"
        assert time.monotonic() - began < PROMPTLY_S
    assert text_of(chat.events(turn["id"])) == "The gates hold."


@contextlib.contextmanager
def frozen_valkey():
    with valkey.connect() as client:
        pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_worker_that_is_stopped_ends_its_turns_within_five_seconds(patient):
    chat = patient
    chat.server.script(lambda call: sse(R, T("One"), silence_forever()))
    turns = [chat.take() for _ in range(3)]
    with chat.reading(turns[0]["id"]) as reader:
        events = begun(chat, reader)
        chat.server.wait_for_calls(3)
        chat.stack.worker.terminate(timeout=5.0)
        events += list(reader)
    assert (events[-1]["state"], events[-1]["error_code"]) == ("interrupted", "WORKER_SHUT_DOWN")
    for turn in turns:
        row = chat.turn(turn["id"])
        assert (row.state, row.answer) == (TurnState.INTERRUPTED, "One")
    assert not any(call.is_open for call in chat.server.chat_calls)


def ask(chat):
    return chat.openai().chat.completions.create(model="scripted", messages=[{"role": "user", "content": "?"}])


def test_a_turn_whose_message_was_lost_is_rung_for_again(chat):
    """Its reader notices that it stands queued, and rings."""
    assert text_of(chat.events(turn_without_a_message(chat))) == "The gates hold."


def turn_without_a_message(chat):
    request = {"messages": [{"role": "user", "content": "?"}]}
    turn = ChatTurn.objects.create(tenant=chat.tenant, provider=chat.provider, model="scripted", request=request)
    return str(turn.public_id)


def test_the_log_server_killed_in_mid_stream(patient):
    chat = patient
    gate = Gate()
    chat.server.next(sse(R, T("One"), at_gate(gate), T(" two"), silence(0.05), T(" three"), F, usage(), D))
    turn = chat.take()
    with chat.reading(turn["id"]) as reader:
        events = begun(chat, reader)
        with valkey.connect() as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)
        gate.release()
        events += list(reader)
    hold_valkey(settings.VAR_DIR)
    assert text_of(events) == "One two three"
    assert events[-1]["state"] == "completed"
    assert chat.wait_ended(turn["id"]).answer == "One two three"
    # The worker takes messages again, without being started anew.
    assert text_of(chat.events(chat.take()["id"])) == "The gates hold."


def test_a_database_locked_at_the_end_of_a_turn_loses_nothing(patient):
    chat = patient
    gate = Gate()
    chat.server.next(sse(R, T("One"), at_gate(gate), T(" two"), F, usage(), D))
    turn = chat.take()
    with chat.reading(turn["id"]) as reader:
        events = begun(chat, reader)
        with transaction.atomic():
            lock_turns()
            gate.release()
            events += begun(chat, reader)
            chat.server.wait_until_ended(1)
            # What was said is said; the end waits for the database.
            assert ChatTurn.objects.get(public_id=turn["id"]).state == TurnState.RUNNING
            assert "end" not in [event["event"] for event in events]
        events += list(reader)
    assert text_of(events) == "One two"
    assert events[-1]["state"] == "completed"
    assert chat.turn(turn["id"]).answer == "One two"


def lock_turns():
    """On SQLite a transaction that may write holds the lock already."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLE streaming_chatturn IN EXCLUSIVE MODE")


def test_tenants_logs_lie_under_keys_of_their_own(chat):
    turn = chat.take()
    chat.wait_ended(turn["id"])
    with valkey.connect() as client:
        eventually(lambda: client.exists(log_key(chat.tenant.pk, turn["id"])))
        assert not client.exists(log_key(chat.tenant.pk + 1, turn["id"]))
    assert blocking.client().ping()
