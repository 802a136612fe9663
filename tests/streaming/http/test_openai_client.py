"""An official OpenAI client, unmodified, against `/v1`: through the web process, the worker, Valkey and back."""

import json

import numpy as np
import openai
import pytest

from embeddings.registry import KeyScope, issue_key, revoke_key
from streaming.models import ChatTurn
from streaming.states import TurnState
from tests.support.factories import make_tenant
from tests.support.provider_server import Gate, gated, hang, hang_after_headers, status, vector_of
from tests.support.provider_server.chat_stream import (
    A,
    D,
    F,
    R,
    T,
    Z,
    at_gate,
    data,
    delta,
    finish,
    silence_forever,
    sse,
)
from tests.support.waiting import PROMPTLY_S


def ask(client, **values):
    return client.chat.completions.create(
        **{"model": "scripted", "messages": [{"role": "user", "content": "Why?"}]} | values
    )


def content(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def collect(stream, chunks):
    for chunk in stream:
        chunks.append(chunk)


def test_a_completion(chat):
    reply = ask(chat.openai())
    assert reply.choices[0].message.content == "The gates hold."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == 12
    assert reply.model == "scripted"
    assert reply._request_id == str(ChatTurn.objects.get().public_id)


def test_a_stream(chat):
    chunks = list(ask(chat.openai(), stream=True))
    assert content(chunks) == "The gates hold."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_last_if_it_was_asked_for(chat):
    chunks = list(ask(chat.openai(), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 12


def test_what_we_do_not_know_is_passed_on_and_what_delivers_is_ours(chat):
    ask(
        chat.openai(),
        temperature=0.25,
        max_tokens=7,
        seed=3,
        stop=["###"],
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_object"},
        user="someone",
        extra_body={"min_p": 0.1, "cache_prompt": True},
    )
    (call,) = chat.server.chat_calls
    expected = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Why?"}],
        "temperature": 0.25,
        "max_tokens": 7,
        "seed": 3,
        "stop": ["###"],
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_object"},
        "user": "someone",
        "min_p": 0.1,
        "cache_prompt": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert call.body == expected


def test_several_choices(chat):
    chat.server.next(sse(T("a"), T("x", 1), T("b"), finish(), T("y", 1), delta({}, "length", choice=1), D))
    reply = ask(chat.openai(), n=2)
    assert [choice.message.content for choice in reply.choices] == ["ab", "xy"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "length"]


def test_tool_calls_streamed_and_whole(chat):
    answer = sse(
        R,
        A("", id="call_1", name="lookup"),
        A('{"pla'),
        A('ce": 1}'),
        A("{}", index=1, id="call_2", name="stop"),
        finish("tool_calls"),
        D,
    )
    chat.server.next(answer, answer)
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
    reply = ask(chat.openai(), tools=tools)
    calls = [(call.id, call.function.name, call.function.arguments) for call in reply.choices[0].message.tool_calls]
    assert calls == [("call_1", "lookup", '{"place": 1}'), ("call_2", "stop", "{}")]
    arguments = {0: "", 1: ""}
    for chunk in ask(chat.openai(), tools=tools, stream=True):
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            arguments[call.index] += call.function.arguments or ""
    assert arguments == {0: '{"place": 1}', 1: "{}"}


def test_reasoning_and_logprobs_survive(chat):
    def token(text):
        logprobs = {"content": [{"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
        return data({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})

    chat.server.next(sse(R, Z("hm"), Z("m"), token("one"), token(" two"), F, D))
    reply = ask(chat.openai(), logprobs=True)
    assert reply.choices[0].message.content == "one two"
    assert reply.choices[0].message.reasoning_content == "hmm"
    assert [item.token for item in reply.choices[0].logprobs.content] == ["one", " two"]


def test_the_clients_own_parser_of_structured_answers(chat):
    from pydantic import BaseModel

    class Verdict(BaseModel):
        holds: bool

    chat.server.next(sse(R, T('{"holds"'), T(": true}"), F, D))
    reply = chat.openai().chat.completions.parse(
        model="scripted", messages=[{"role": "user", "content": "Does it?"}], response_format=Verdict
    )
    assert reply.choices[0].message.parsed == Verdict(holds=True)


def test_models(chat):
    client = chat.openai()
    names = [model.id for model in client.models.list()]
    assert names == ["scripted", "scripted+knowledge", "embed"]
    assert client.models.retrieve("scripted+knowledge").id == "scripted+knowledge"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("encoding", [openai.omit, "float"])
def test_embeddings(chat, encoding):
    reply = chat.openai().embeddings.create(model="embed", input=["one", "two"], encoding_format=encoding)
    assert [item.index for item in reply.data] == [0, 1]
    for item, text in zip(reply.data, ["one", "two"], strict=True):
        np.testing.assert_allclose(item.embedding, vector_of(text), rtol=1e-5)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([[9906, 1917], [15]], "check_embedding_ctx_length=False"),
        ([9906, 1917], "Send texts"),
        (["one", ""], "none of them empty"),
        ([], "1 to 2048 texts"),
        (["one", None], "a list of"),
    ],
)
def test_embeddings_of_anything_but_texts_are_refused_by_the_fields_own_name(chat, texts, said):
    with pytest.raises(openai.BadRequestError) as refused:
        chat.openai().embeddings.create(model="embed", input=texts)
    assert refused.value.param == "input"
    assert said in refused.value.message
    assert chat.server.calls == []


@pytest.mark.parametrize(
    ("answered", "told"), [(400, 400), (413, 400), (422, 400), (500, 502), (502, 502)], ids=lambda code: f"{code}"
)
def test_an_embedding_that_the_provider_refuses_is_the_clients_to_mend_and_one_that_fails_is_not(chat, answered, told):
    said = status(answered, {"error": {"message": "the input is too long"}})
    chat.server.when(lambda call: call.kind == "embedding", said)
    with pytest.raises(openai.APIStatusError) as refused:
        chat.openai().embeddings.create(model="embed", input="one")
    assert (refused.value.status_code, refused.value.type) == (
        told,
        "invalid_request_error" if told == 400 else "api_error",
    )
    assert f"{answered}: the input is too long" in refused.value.message


# --- errors, each as the client's own type ----------------------------------------------------------------------------
def test_an_unknown_and_a_revoked_key(chat):
    with pytest.raises(openai.AuthenticationError) as refused:
        ask(chat.openai(api_key="sgk_000000000000_0"))
    assert refused.value.code == "invalid_api_key"
    row, key = issue_key(chat.tenant)
    revoke_key(row)
    with pytest.raises(openai.AuthenticationError):
        ask(chat.openai(api_key=key))
    assert chat.server.chat_calls == []


def test_a_key_without_the_scope(chat):
    _, key = issue_key(chat.tenant, scopes=[KeyScope.SEARCH])
    with pytest.raises(openai.PermissionDeniedError) as refused:
        ask(chat.openai(api_key=key))
    assert refused.value.code == "insufficient_scope"


def test_an_unknown_model(chat):
    with pytest.raises(openai.NotFoundError) as refused:
        ask(chat.openai(), model="gpt-4")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    _, key = issue_key(make_tenant())
    with pytest.raises(openai.NotFoundError):
        ask(chat.openai(api_key=key))


def test_an_endpoint_that_is_not_served(chat):
    with pytest.raises(openai.NotFoundError) as refused:
        chat.openai().responses.create(model="scripted", input="Why?")
    assert (refused.value.type, refused.value.code) == ("invalid_request_error", "not_found")
    assert "There is no POST /v1/responses here" in refused.value.message


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"n": 0}, "n"),
        ({"stream_options": {"include_usage": "perhaps"}}, "stream_options.include_usage"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(chat, values, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(chat.openai(), **values)
    assert refused.value.param == param


def test_a_body_that_is_no_json(chat):
    with chat.http() as client:
        reply = client.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_request_that_is_too_large(chat):
    with pytest.raises(openai.APIStatusError) as refused:
        ask(chat.openai(), messages=[{"role": "user", "content": "x" * 200_000}])
    assert refused.value.status_code == 413
    assert refused.value.code == "request_too_large"
    assert not ChatTurn.objects.exists()


@pytest.mark.parametrize("parts", [[60_000] * 4, [100_001], [100_000, 1], [60_000, 40_001], [1_000_000]], ids=str)
def test_a_request_that_is_too_large_and_does_not_say_so(chat, parts):
    """Also where its end comes together with the byte that is too much: nothing more is waited for."""
    with chat.http() as client:
        reply = client.post("/v1/chat/completions", content=iter([b"x" * part for part in parts]))
    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("upstream", "expected", "kind"),
    [
        (400, 400, openai.BadRequestError),
        (401, 502, openai.InternalServerError),
        (404, 502, openai.InternalServerError),
        (413, 413, openai.APIStatusError),
        (429, 429, openai.RateLimitError),
        (500, 502, openai.InternalServerError),
        (503, 503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_providers_refusals(chat, upstream, expected, kind, stream):
    chat.server.script(lambda call: status(upstream, {"error": {"message": "it is full", "type": "t", "code": "c"}}))
    with pytest.raises(kind) as refused:
        ask(chat.openai(), stream=stream)
    assert refused.value.status_code == expected
    assert refused.value.message.endswith("it is full") or "it is full" in refused.value.message
    assert len(chat.server.chat_calls) == (3 if upstream in (429, 500, 503) else 1)


def test_a_provider_that_is_not_there(chat):
    chat.server.stop()
    with pytest.raises(openai.InternalServerError) as refused:
        ask(chat.openai())
    assert refused.value.status_code == 502
    assert refused.value.code == "provider_unreachable"
    assert refused.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("reply", [hang(), hang_after_headers("text/event-stream"), sse(R, silence_forever())])
def test_silence_ends_as_a_gateway_timeout_after_three_attempts(chat, reply):
    chat.server.script(lambda call: reply)
    with pytest.raises(openai.InternalServerError) as refused:
        ask(chat.openai())
    assert refused.value.status_code == 504
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(chat.server.chat_calls) == 3
    for call in chat.server.chat_calls:
        assert chat.server.wait_until_ended(call.number, timeout=PROMPTLY_S).ended_by == "client_closed"


def test_an_error_after_the_first_text_comes_as_the_clients_error(chat):
    chat.server.next(sse(R, T("Half of"), T(" it"), silence_forever()))
    chunks = []
    with pytest.raises(openai.APIError) as failed:
        collect(ask(chat.openai(), stream=True), chunks)
    assert content(chunks) == "Half of it"
    assert failed.value.code == "stream_idle_timeout"
    turn = ChatTurn.objects.get()
    assert (turn.state, turn.answer) == (TurnState.IDLE_TIMEOUT, "Half of it")


def test_a_reply_that_is_slow_to_begin_gets_its_status_and_chunks_that_add_nothing(chat):
    gate = Gate()
    chat.server.next(sse(R, at_gate(gate), T("At last"), F, D))
    chat.provider.stream_idle_timeout_ms = 20_000
    chat.provider.save()
    body = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "Why?"}]}
    with chat.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        for delta in ({"role": "assistant"}, {}):
            kept_alive = json.loads(next(line for line in lines if line).removeprefix("data: "))
            assert kept_alive["choices"] == [{"index": 0, "delta": delta, "finish_reason": None}]
        gate.release()
        assert any("At last" in line for line in lines)


def test_a_longer_answer_than_is_kept_ends_with_its_reason(chat):
    chat.server.next(sse(R, *[T("x" * 5_000)] * 8, F, D))
    reply = ask(chat.openai())
    assert len(reply.choices[0].message.content) == 20_000
    assert reply.choices[0].finish_reason == "length"
    turn = ChatTurn.objects.get()
    assert (turn.state, turn.error_code) == (TurnState.TRUNCATED, "ANSWER_TOO_LONG")


def test_more_turns_than_a_tenant_may_have(chat):
    gate = Gate()
    chat.server.script(lambda call: gated(gate))
    turns = [chat.take() for _ in range(6)]
    with pytest.raises(openai.RateLimitError) as refused:
        ask(chat.openai())
    assert refused.value.code == "too_many_turns"
    gate.release()
    for turn in turns:
        chat.wait_ended(turn["id"])
    assert ask(chat.openai()).choices[0].message.content == "The gates hold."


# --- hang-up ----------------------------------------------------------------------------------------------------------
def test_a_hang_up_closes_the_upstream_socket_within_a_second(chat):
    chat.server.next(sse(R, T("One"), silence_forever()))
    chat.provider.stream_idle_timeout_ms = 30_000
    chat.provider.save()
    stream = ask(chat.openai(), stream=True)
    assert next(iter(stream)).choices[0].delta.content == "One"
    (call,) = chat.server.chat_calls
    stream.close()
    assert chat.server.wait_until_ended(call.number, timeout=PROMPTLY_S).ended_by == "client_closed"
    turn = chat.wait_ended(str(ChatTurn.objects.get().public_id))
    assert (turn.state, turn.answer) == (TurnState.CANCELLED, "One")


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_before_any_answer_cancels_too(chat, stream):
    chat.server.next(sse(R, silence_forever()))
    chat.provider.stream_idle_timeout_ms = 30_000
    chat.provider.save()
    client = chat.openai(timeout=0.4)
    with pytest.raises(openai.APITimeoutError):
        ask(client, stream=stream)
    call = chat.server.wait_for_calls(1)[0]
    assert chat.server.wait_until_ended(call.number, timeout=PROMPTLY_S).ended_by == "client_closed"
    assert chat.wait_ended(str(ChatTurn.objects.get().public_id)).state == TurnState.CANCELLED


def test_no_prompt_answer_or_key_is_in_any_log(chat):
    chat.server.next(sse(R, T("zebra-answer"), F, D), status(400, {"error": {"message": "bad zebra-prompt"}}))
    ask(chat.openai(), messages=[{"role": "user", "content": "zebra-prompt"}])
    with pytest.raises(openai.BadRequestError):
        ask(chat.openai(), messages=[{"role": "user", "content": "zebra-prompt"}])
    assert "turn=" in chat.stack.logs
    assert "zebra" not in chat.stack.logs
    assert chat.key.rpartition("_")[2] not in chat.stack.logs
