"""The kinds of `test_streaming_kinds` whose fault would show in what is stored or sent on: worker, log, web, client."""

import contextlib
import os
import signal
import threading

import openai
import pytest

from project.celery import app
from streaming.models import ChatTurn
from streaming.states import TURN_UNFINISHED, TurnState
from streaming.turns.transitions import RUN_TURN
from tests.streaming.http.test_chat_api import with_a_row
from tests.support.chat_stack import text_of
from tests.support.processes import start_web, start_worker
from tests.support.provider_server import (
    D,
    F,
    Gate,
    R,
    T,
    at_gate,
    data,
    delta,
    finish,
    hang,
    raw,
    silence,
    silence_forever,
    sse,
    status,
    usage,
)
from tests.support.threads import in_thread
from tests.support.waiting import PROMPTLY_S, eventually
from tests.wires.streaming_kinds import CALLS, FRAME, KEY, NO_DELTA, NO_JSON, STATUS, choice

ENDLESS_WISH = status(429, headers={"Retry-After": "9" * 30})
THROUGH = {
    # the reply -> the turn's state and kind, the client's status, what it is told
    "a shape of error": (sse(data({"detail": "no such adapter"})), FRAME, 502, "no such adapter"),
    "a wish that fits nowhere": (ENDLESS_WISH, STATUS, 429, "scripted 429"),
    "a number that fits nowhere": (sse(R, data('{"choices": [], "usage": {"n": 1e999}}'), D), NO_JSON, 502, "not JSON"),
    "nesting that fits nowhere": (
        sse(R, data('{"choices": [], "usage": ' + "[" * 600 + "]" * 600 + "}")),
        NO_JSON,
        502,
        "not JSON",
    ),
    "an answer elsewhere": (
        sse(choice(message={"content": "a"}, finish_reason="stop"), D),
        NO_DELTA,
        502,
        "no chat stream",
    ),
    "a status of its own": (raw(b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n"), STATUS, 502, "999"),
    "a charset that it has not": (status(400, "no", content_type="text/plain; charset=utf-16"), STATUS, 400, "no"),
}


def ask(chat, **values):
    return chat.openai().chat.completions.create(
        **{"model": "scripted", "messages": [{"role": "user", "content": "Why?"}]} | values
    )


@pytest.mark.both_databases
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("reply", "end", "code", "said"), THROUGH.values(), ids=THROUGH.keys())
def test_what_an_official_client_is_told(chat, reply, end, code, said, stream):
    chat.server.next(reply)
    with pytest.raises(openai.APIStatusError) as refused:
        ask(chat, stream=stream)
    assert refused.value.status_code == code
    assert said in refused.value.message
    turn = ChatTurn.objects.get()
    assert ((turn.state, turn.error_kind), len(chat.server.chat_calls)) == (end, 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_odd_tool_calls_are_whole_for_an_official_client(chat, stream):
    deltas, calls = CALLS["all of them numbered 0"]
    chat.server.next(sse(R, *[delta({"tool_calls": each}) for each in deltas], finish("tool_calls"), D))
    if stream:
        with chat.openai().chat.completions.stream(
            model="scripted", messages=[{"role": "user", "content": "?"}]
        ) as read:
            reply = read.get_final_completion()
    else:
        reply = ask(chat)
    found = reply.choices[0].message.tool_calls
    assert [(each.function.name, each.function.arguments) for each in found] == calls


BODIES = {"NaN": "NaN", "infinite": "1e999", "deep": "[" * 700 + "]" * 700, "a very long number": "9" * 5_000}


@pytest.mark.parametrize("value", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat/turns"])
def test_a_request_that_no_database_keeps_is_the_clients_mistake(chat, path, value):
    body = '{"model": "scripted", "messages": [{"role": "user", "content": "?"}], "logit_bias": ' + value + "}"
    with chat.http() as client:
        reply = client.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not ChatTurn.objects.exists()


def test_a_field_is_named_by_its_place_and_not_by_its_type(chat):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(chat, messages=[{"role": "user", "content": 5}])
    assert refused.value.param == "messages.0.content"


def test_23_finished_and_the_socket_open_is_complete_after_the_grace(chat):
    """The real grace of 10 s, whatever the other budgets are."""
    chat.server.next(sse(R, T("Hello"), F, silence_forever()))
    events = chat.events(chat.take()["id"])
    assert (events[-1]["state"], text_of(events)) == ("completed", "Hello")
    assert chat.server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"


def test_15_a_client_that_reads_slowly_is_charged_nothing(chat):
    chat.server.next(sse(R, *(step for text in "abcdef" for step in (T(text), silence(0.05))), F, usage(), D))
    stream = ask(chat, stream=True)
    first = next(iter(stream)).choices[0].delta.content
    assert chat.wait_ended(str(ChatTurn.objects.get().public_id)).state == TurnState.COMPLETED
    rest = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert first + "".join(rest) == "abcdef"


@contextlib.contextmanager
def frozen(process):
    os.kill(process._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process._process.pid, signal.SIGCONT)


def test_17_a_worker_that_stood_still_past_a_budget_reports_no_false_timeout(chat):
    gate = Gate()
    chat.server.next(sse(R, T("One"), at_gate(gate), T(" two"), F, usage(), D))
    turn = chat.take()
    with chat.reading(turn["id"]) as reader:
        while next(reader)["event"] != "delta":
            pass
        with frozen(chat.stack.worker):
            gate.release()
            chat.server.wait_until_ended(1)
            # Longer than the idle budget of 600 ms, shorter than the lease.
            threading.Event().wait(0.8)
        end = list(reader)[-1]
    assert (end["state"], chat.turn(turn["id"]).answer) == ("completed", "One two")


def test_a_cancel_and_a_hang_up_before_any_worker_has_the_turn_make_no_call(chat):
    with frozen(chat.stack.worker):
        turn = chat.take()
        with chat.http() as client:
            cancelled = client.post(f"/api/chat/turns/{turn['id']}/cancel").json()
        assert (cancelled["state"], chat.events(turn["id"])[-1]["state"]) == ("cancelled", "cancelled")
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                chat.openai(timeout=0.3).chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": "?"}], stream=stream
                )
        eventually(lambda: not ChatTurn.objects.filter(state__in=TURN_UNFINISHED).exists())
    assert chat.events(chat.take()["id"])[-1]["state"] == "completed"
    assert len(chat.server.chat_calls) == 1
    assert ChatTurn.objects.filter(state=TurnState.CANCELLED).count() == 3


def test_a_cancel_while_the_question_is_embedded_closes_that_socket_within_a_second(chat):
    type(chat.provider).objects.update(query_timeout_ms=30_000)
    with_a_row(chat)
    chat.server.when(lambda call: call.kind == "embedding", hang())
    turn = chat.take(knowledge=True)
    chat.server.wait_for_calls(1)
    with chat.http() as client:
        client.post(f"/api/chat/turns/{turn['id']}/cancel")
    assert chat.server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"
    assert chat.wait_ended(turn["id"], timeout=PROMPTLY_S).state == TurnState.CANCELLED
    assert chat.server.chat_calls == []


def test_the_wall_clock_counts_from_the_claim_and_bounds_the_retrieval_too(chat):
    type(chat.provider).objects.update(query_timeout_ms=30_000, turn_wall_ms=400)
    with_a_row(chat)
    chat.server.when(lambda call: call.kind == "embedding", hang())
    end = chat.events(chat.take(knowledge=True)["id"])[-1]
    assert (end["state"], end["error_kind"]) == ("lifetime_exceeded", "wall")
    assert chat.server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"


def test_an_answer_over_the_cap_closes_its_socket(chat):
    chat.server.next(sse(R, *[T("x" * 5_000)] * 8, silence_forever()))
    type(chat.provider).objects.update(stream_idle_timeout_ms=30_000)
    assert ask(chat).choices[0].finish_reason == "length"
    assert chat.server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"


def test_a_cancel_in_the_pause_before_an_attempt_ends_it(chat):
    chat.server.next(status(429, headers={"Retry-After": "25"}))
    turn = chat.take()
    chat.server.wait_until_ended(1)
    with chat.http() as client:
        client.post(f"/api/chat/turns/{turn['id']}/cancel")
    assert chat.wait_ended(turn["id"], timeout=PROMPTLY_S).state == TurnState.CANCELLED
    assert len(chat.server.chat_calls) == 1


def test_a_silent_embedding_is_a_gateway_timeout_of_the_answer(chat):
    type(chat.provider).objects.update(query_timeout_ms=100)
    with_a_row(chat)
    chat.server.when(lambda call: call.kind == "embedding", hang())
    with pytest.raises(openai.InternalServerError) as failed:
        ask(chat, model="scripted+knowledge")
    assert failed.value.status_code == 504
    assert ChatTurn.objects.get().error_kind == "retrieval_timeout"


@pytest.mark.parametrize(("wanted", "fits"), [(384, True), (5, False), (0, False)])
def test_the_dimensions_of_an_embedding_are_its_models(chat, wanted, fits):
    make = chat.openai().embeddings.create
    if fits:
        assert len(make(model="embed", input="one", dimensions=wanted).data[0].embedding) == wanted
        return
    with pytest.raises(openai.BadRequestError) as refused:
        make(model="embed", input="one", dimensions=wanted)
    assert refused.value.param == "dimensions"


def test_two_cancels_at_the_moment_of_the_end_are_one_end(chat):
    for _ in range(8):
        gate = Gate()
        chat.server.next(sse(R, T("One"), at_gate(gate), T(" two"), F, usage(), D))
        turn = chat.take()
        gate.wait_arrived()
        with chat.http() as client:
            asked = [in_thread(client.post, f"/api/chat/turns/{turn['id']}/cancel") for _ in range(2)]
            gate.release()
            assert [reply().status_code for reply in asked] == [200, 200]
        row = chat.wait_ended(turn["id"])
        events = chat.events(turn["id"])
        assert row.state in (TurnState.COMPLETED, TurnState.CANCELLED)
        assert [event["state"] for event in events if event["event"] == "end"] == [row.state]
        assert text_of(events) == row.answer
        assert row.answer in ("One", "One two")


def test_two_workers_run_a_turn_once_and_one_goes_on_without_the_other(chat):
    second = start_worker("worker-beside")
    try:
        gate = Gate()
        chat.server.next(sse(R, T("One"), at_gate(gate), T(" two"), F, usage(), D))
        turn = chat.take()
        gate.wait_arrived()
        for _ in range(6):
            app.send_task(RUN_TURN, args=[turn["id"]])
        gate.release()
        assert chat.wait_ended(turn["id"]).answer == "One two"
        chat.stack.worker.terminate()
        assert chat.events(chat.take()["id"])[-1]["state"] == "completed"
        assert len(chat.server.chat_calls) == 2
    finally:
        second.end()


def test_nothing_confidential_is_logged_at_any_level_and_metrics_are_the_same_everywhere(chat):
    chat.stack.worker.terminate()
    worker = start_worker("worker-debug", LOG_LEVEL="DEBUG", SLUICEGATE_KEY_ZEBRA=KEY)
    web, address = start_web("web-debug", LOG_LEVEL="DEBUG")
    try:
        type(chat.provider).objects.update(api_key_env="SLUICEGATE_KEY_ZEBRA")
        answers = [
            sse(R, T("zebra-answer"), F, D),
            status(400, {"error": {"message": f"zebra-said {KEY}"}}),
            sse(R, T("zebra-half"), data("{zebra")),
        ]
        chat.server.next(*answers)
        client = chat.openai(base_url=f"{address}/v1")
        for _ in answers:
            with contextlib.suppress(openai.APIError):
                list(
                    client.chat.completions.create(
                        model="scripted", messages=[{"role": "user", "content": "zebra-prompt"}], stream=True
                    )
                )
        assert [call.headers["authorization"] for call in chat.server.chat_calls] == [f"Bearer {KEY}"] * 3
        eventually(lambda: not ChatTurn.objects.filter(state__in=TURN_UNFINISHED).exists())
        logged = worker.output + web.output
        assert " DEBUG " in worker.output
        for secret in ("zebra-", "{zebra", KEY, chat.key.rpartition("_")[2]):
            assert secret not in logged
        said = [line for line in worker.output.splitlines() if " streaming.upstream.pipeline " in line]
        assert len(said) >= 6
        assert all("turn=" in line and "attempt=" in line for line in said)
        with chat.http() as other:
            scraped = [other.get(f"{where}/metrics").text for where in (address, chat.url)]
        assert scraped[0] == scraped[1]
        assert 'sluicegate_chat_attempts_total{kind="malformed_json",state="protocol_error"} 1.0' in scraped[0]
    finally:
        worker.end()
        web.end()
