"""What servers put into a stream arrives whole: through the worker, the log and the web process, streamed and whole."""

import json
from pathlib import Path

import pytest

from streaming.http import error_words
from streaming.log.answer import Answer
from streaming.models import ChatTurn
from streaming.upstream.chunks import ChunkReader
from streaming.upstream.sse_decoder import SseEvent
from tests.support.attempts import play
from tests.support.provider_server import (
    D,
    F,
    Packet,
    R,
    T,
    data,
    delta,
    finish,
    forever,
    hang,
    silence,
    silence_forever,
    sse,
    status,
    usage,
)
from tests.wires.reply_kinds import CALLS, EXTRAS, FINISHES, KEEP_ALIVES, MESSAGES, TYPES, refusal

pytestmark = pytest.mark.both_databases
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "?"}]}


def whole(chat, **fields):
    with chat.http() as client:
        reply = client.post("/v1/chat/completions", json=BODY | fields)
    return reply.json()


def chunks(chat, **fields):
    """The objects of a streamed answer; an error frame is the last of them."""
    with (
        chat.http() as client,
        client.stream("POST", "/v1/chat/completions", json=BODY | fields | {"stream": True}) as reply,
    ):
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines), "every line is data: some clients break on any other"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def folded(sent):
    """The choice of a streamed answer, as a client that appends what it gets has it."""
    answer = Answer()
    for choice in (choice for each in sent for choice in each["choices"]):
        fields = {name: value for name, value in choice.items() if name not in ("index", "delta", "finish_reason")}
        answer.add(0, {name: value for name, value in choice["delta"].items() if name != "role"}, fields)
        if choice["finish_reason"]:
            answer.finish(0, choice["finish_reason"])
    return answer.choices()[0]


def without_made_ids(calls):
    """The calls, with None for each id that was made here: they are unlike, and begin with `call_`."""
    made = [call["id"] for call in calls if call["id"].startswith("call_")]
    assert len(set(made)) == len(made)
    return [call | {"id": None} if call["id"] in made else call for call in calls]


@pytest.mark.parametrize(("steps", "message"), MESSAGES.values(), ids=MESSAGES.keys())
def test_any_field_of_a_delta_arrives(chat, steps, message):
    chat.server.script(lambda call: sse(*steps))
    expected = {"role": "assistant", "content": None} | message
    answer = whole(chat)
    assert answer["choices"][0]["message"] == expected
    assert folded(chunks(chat))["message"] == expected
    assert [turn.state for turn in ChatTurn.objects.all()] == ["completed", "completed"]
    assert [turn.choices[0]["message"] for turn in ChatTurn.objects.all()] == [expected, expected]


@pytest.mark.parametrize(("steps", "calls"), CALLS.values(), ids=CALLS.keys())
def test_a_tool_call_is_one_whatever_its_ids_are(chat, steps, calls):
    chat.server.script(lambda call: sse(*steps, finish("tool_calls"), D))
    answer = whole(chat)["choices"][0]
    assert without_made_ids(answer["message"]["tool_calls"]) == calls
    assert without_made_ids(folded(chunks(chat))["message"]["tool_calls"]) == calls
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("reasons", "told"), FINISHES.values(), ids=FINISHES.keys())
def test_a_later_stop_replaces_no_reason_that_tells_what_to_do(chat, reasons, told):
    chat.server.script(lambda call: sse(T("a"), *map(finish, reasons), D))
    assert whole(chat)["choices"][0]["finish_reason"] == told
    assert folded(chunks(chat))["finish_reason"] == told


@pytest.mark.parametrize(("steps", "fields", "of_choice"), EXTRAS.values(), ids=EXTRAS.keys())
def test_fields_of_chunks_and_choices_arrive(chat, steps, fields, of_choice):
    chat.server.script(lambda call: sse(*steps))
    answer = whole(chat)
    assert {name: answer.get(name) for name in fields} == fields
    assert {name: answer["choices"][0].get(name) for name in of_choice} == of_choice
    sent = chunks(chat)
    assert {name: next((each[name] for each in sent if name in each), None) for name in fields} == fields
    choice = folded(sent)
    assert {name: choice.get(name) for name in of_choice} == of_choice
    first, second = ChatTurn.objects.all()
    assert first.reply_fields == second.reply_fields == fields


def test_usage_in_each_chunk_is_passed_on_where_it_was_asked_for_and_none_erases_it(chat):
    counted = [
        data({"choices": [{"index": 0, "delta": {"content": text}}], "usage": {"total_tokens": at}})
        for at, text in enumerate("ab", start=1)
    ]
    chat.server.script(lambda call: sse(*counted, F, usage(), data({"choices": [], "usage": {}}), D))
    asked = chunks(chat, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert chat.server.chat_calls[-1].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert [each["usage"]["total_tokens"] for each in asked if each.get("usage")][-1] > 2
    assert asked[0]["usage"] == {"total_tokens": 1}
    assert not [each for each in chunks(chat, stream_options={"include_usage": None}) if "usage" in each]
    assert whole(chat)["usage"]["total_tokens"] > 2


@pytest.mark.parametrize("reply", TYPES.values(), ids=TYPES.keys())
def test_a_stream_under_another_type_is_a_stream(server, reply):
    played = play(server, reply)
    assert (played.end, played.text) == (("completed", ""), "a")


@pytest.mark.parametrize("ping", KEEP_ALIVES.values(), ids=KEEP_ALIVES.keys())
def test_a_keep_alive_of_any_form_is_silence_and_no_error(server, ping):
    ping = Packet(ping)
    played = play(server, ping, R, ping, T("a"), ping, F, ping, D)
    assert (played.end, played.text) == (("completed", ""), "a")
    endless = play(server, R, T("a"), forever(silence(0.02), ping), stream_idle_timeout_ms=250)
    assert endless.end == ("idle_timeout", "keepalive")


NAMED = {
    "context_length_exceeded": (400, "messages"),
    "model_overloaded_today": (503, None),
    "string_above_max_length": (400, "tools[0].function.name"),
}


@pytest.mark.parametrize(("code", "answer"), NAMED.items(), ids=NAMED.keys())
def test_the_providers_own_code_and_param_are_the_clients(chat, code, answer):
    number, param = answer
    chat.server.script(lambda call: status(number, refusal(code=code, param=param, type="t")))
    for error in (whole(chat)["error"], whole(chat, stream=True)["error"]):
        assert (error["code"], error["param"], error["message"]) == (code, param, "no")
    turn = ChatTurn.objects.first()
    assert (turn.provider_code, turn.error_param, turn.error_code) == (code, param or "", "PROVIDER_STATUS")


def test_a_code_in_an_error_frame_is_the_clients_and_one_that_asks_for_a_repetition_is_not(chat):
    for code, told in (("context_length_exceeded",) * 2, ("server_error", error_words.PROVIDER_ERROR)):
        chat.server.next(sse(R, T("Half"), data(refusal(code=code, param="messages"))))
        error = chunks(chat)[-1]["error"]
        assert (error["code"], error["param"]) == (told, "messages")


def test_a_quota_that_is_used_up_is_not_tried_again_here_or_by_the_client(chat):
    chat.server.script(lambda call: status(429, refusal(code="insufficient_quota", type="insufficient_quota")))
    with chat.http() as client:
        reply = client.post("/v1/chat/completions", json=BODY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "insufficient_quota")
    assert reply.headers["x-should-retry"] == "false"
    assert len(chat.server.chat_calls) == 1


FAULTS = {
    "silent": (hang(), "provider_timeout"),
    "silent after text": (sse(R, T("a"), silence_forever()), "stream_idle_timeout"),
    "cut": (sse(R, T("a")), "stream_truncated"),
    "not JSON": (sse(R, T("a"), data("{")), "provider_protocol_error"),
    "an errno as its code": (status(502, refusal(code="ETIMEDOUT")), "provider_error"),
}


@pytest.mark.parametrize(("reply", "word"), FAULTS.values(), ids=FAULTS.keys())
def test_no_errno_word_is_told_under_v1(chat, reply, word):
    chat.server.script(lambda call: reply)
    answered = word in ("provider_timeout", "provider_error")
    error = whole(chat) if answered else chunks(chat)[-1]
    assert error["error"]["code"] == word
    assert not any(name in json.dumps(error) for name in ("ETIMEDOUT", "ECONN", "EPIPE", "Errno"))


def test_every_word_is_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    words = {*error_words.BY_CODE.values(), *error_words.BY_KIND.values(), *error_words.BY_STATE.values()}
    assert not [word for word in sorted(words) if f"`{word}`" not in page]


@pytest.mark.parametrize(("steps", "message"), MESSAGES.values(), ids=MESSAGES.keys())
def test_a_reader_of_a_broken_log_gets_the_rest(steps, message):
    reader = ChunkReader()
    events = [SseEvent("", step.payload.decode().removeprefix("data: ").strip(), "") for step in steps]
    deltas = [delta for each in events for delta in reader.read(each) or []]
    for seen in range(len(deltas) + 1):
        stored, reading = Answer(), Answer()
        for at, each in enumerate(deltas):
            stored.add(0, each.said, each.choice_fields)
            if at < seen:
                reading.add(0, each.said, each.choice_fields)
        for index, rest, fields in reading.missing_from(stored.choices()):
            reading.add(index, rest, fields)
        assert reading.choices() == stored.choices()
    assert stored.choices()[0]["message"] == {"role": "assistant", "content": None} | message


def test_a_delta_of_a_field_alone_counts_as_delivered(server):
    """An answer of pictures that then breaks is never replayed."""
    played = play(server, R, delta({"images": [1]}), silence_forever(), stream_idle_timeout_ms=250)
    assert (played.result.delivered, played.retried) == (True, False)
