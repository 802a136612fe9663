"""Chat with the real local model behind the whole path: web process, worker and Valkey before a llama.cpp server."""

import contextlib
import http.client
import itertools
import json
import time
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from django.utils import timezone

from project.local.model_files import SMOLLM2
from project.local.model_server import ModelServer
from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TURN_UNFINISHED, TurnState
from streaming.turns import transitions
from tests.support.chat_stack import chat_at, text_of
from tests.support.factories import make_provider
from tests.support.local_models import MODELS, HeldLoad
from tests.support.processes import Process
from tests.support.threads import in_thread
from tests.support.waiting import PROMPTLY_S, eventually

SLOTS = 4
# A minute of text and more, whatever the model would rather do.
ENDLESS = {"max_tokens": 2_500, "ignore_eos": True}
# More tokens than one slot has room for.
TOO_LONG = [{"role": "user", "content": "word " * 4_000}]


@pytest.fixture
def local(transactional_db, chat_stack, local_server):
    """A tenant of the real server, with its own budgets; what a test leaves running is cancelled."""
    with chat_at(chat_stack, local_provider(local_server.base_url)) as chat:
        yield chat
        for left in ChatTurn.objects.filter(state__in=TURN_UNFINISHED):
            transitions.request_cancel(left)


@pytest.fixture
def loading(transactional_db, chat_stack, local_server):
    """A real server that loads its model until it is let go, and a tenant of it."""
    with HeldLoad(MODELS / SMOLLM2.file_name) as held, chat_at(chat_stack, local_provider(held.base_url)) as chat:
        assert held.health() == 503
        yield held, chat


def local_provider(base_url, **budgets):
    given = {"request_timeout_ms": 30_000, "stream_first_content_timeout_ms": 30_000, "stream_idle_timeout_ms": 5_000}
    models = {"embedding_model": ModelServer.embedding_model, "chat_model": ModelServer.chat_model}
    return make_provider(base_url=base_url, **models, **given | budgets)


def ask(client, **values):
    question = {"model": "smollm2", "messages": [{"role": "user", "content": "What is git?"}], "max_tokens": 12}
    return client.chat.completions.create(**question | values)


def content(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def busy(server):
    """How many of the model's slots are at work, as the model server itself says."""
    slots = httpx2.get(f"{server.base_url.removesuffix('/v1')}/slots", trust_env=False).json()
    assert len(slots) == SLOTS
    return sum(slot["is_processing"] for slot in slots)


def the_turn(chat):
    return chat.wait_ended(str(ChatTurn.objects.get().public_id))


def attempts_of(turn):
    return [(attempt.end_state, attempt.error_kind) for attempt in turn.attempts.order_by("number")]


# --- answers ----------------------------------------------------------------------------------------------------------
def test_it_streams(local):
    chunks = list(ask(local.openai(), max_tokens=40, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(texts) > 4
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("length", "stop")
    assert chunks[-1].usage.completion_tokens <= 40
    turn = the_turn(local)
    assert (turn.state, turn.answer) == (TurnState.COMPLETED, "".join(texts))
    assert turn.usage["total_tokens"] == chunks[-1].usage.total_tokens
    assert attempts_of(turn) == [("completed", "")]


def test_a_whole_completion(local):
    reply = ask(local.openai(), max_tokens=4, extra_body={"ignore_eos": True})
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 4
    assert reply.choices[0].message.content == the_turn(local).answer != ""


@pytest.mark.parametrize("settled", [{"temperature": 0}, {"seed": 7}])
def test_what_is_settled_is_the_same_twice(local, settled):
    # A prompt that is read from the cache is computed in another batch, and may round differently.
    texts = [ask(local.openai(), **settled, max_tokens=8, extra_body={"cache_prompt": False}) for _ in range(2)]
    first, second = (reply.choices[0].message.content for reply in texts)
    assert first == second != ""


def test_several_choices(local):
    reply = ask(local.openai(), n=3, max_tokens=5, extra_body={"ignore_eos": True})
    assert [(choice.index, choice.finish_reason) for choice in reply.choices] == [(n, "length") for n in range(3)]
    assert all(choice.message.content for choice in reply.choices)


def test_it_stops_where_it_is_told_to(local):
    same = {"temperature": 0, "max_tokens": 8, "extra_body": {"cache_prompt": False}}
    whole = ask(local.openai(), **same).choices[0].message.content
    word = whole.split()[3]
    stopped = ask(local.openai(), stop=[word], **same).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (whole.partition(word)[0], "stop")


def test_log_probabilities_of_every_token(local):
    reply = ask(local.openai(), logprobs=True, top_logprobs=2, max_tokens=5)
    tokens = reply.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == reply.choices[0].message.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)


def test_the_clients_own_parser_of_structured_answers(local):
    from pydantic import BaseModel

    class Verdict(BaseModel):
        holds: bool

    messages = [{"role": "user", "content": "Does the gate hold?"}]
    reply = local.openai().chat.completions.parse(
        model="smollm2", messages=messages, response_format=Verdict, temperature=0, max_tokens=60
    )
    assert isinstance(reply.choices[0].message.parsed, Verdict)


# --- refusals: the server's own words, as the client's own exceptions ---------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_once(local, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(local.openai(), messages=TOO_LONG, stream=stream)
    assert "exceeds the available context size (3072 tokens)" in refused.value.message
    turn = the_turn(local)
    assert (turn.state, turn.answer) == (TurnState.PROVIDER_ERROR, "")
    assert [state for state, _ in attempts_of(turn)] == ["provider_error"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": "hot"}, "type must be number, but is string"),
        ({"n": 5}, "Value must be between 1 <= value <= 4, but got 5"),
        ({"tool_choice": "nonsense", "tools": [{"type": "function", "function": {"name": "a"}}]}, "tool_choice"),
        ({"response_format": {"type": "nonsense"}}, "response_format type must be one of"),
        ({"extra_body": {"grammar": "root ::= nonsense"}}, "failed to parse grammar"),
    ],
)
def test_what_it_cannot_do_it_says_itself(local, values, said):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(local.openai(), **values)
    assert said in refused.value.message
    assert len(attempts_of(the_turn(local))) == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tools": [{"type": "nonsense"}]}, "Unsupported tool type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                    }
                ]
            },
            "image input is not supported",
        ),
    ],
)
def test_a_refusal_that_it_calls_an_error_of_its_own_is_tried_again_and_passed_on(local, values, said):
    """llama.cpp answers these with a 500: nothing but its text would tell them from a failure that passes."""
    with pytest.raises(openai.InternalServerError) as refused:
        ask(local.openai(), **values)
    assert refused.value.status_code == 502
    assert said in refused.value.message
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert [state for state, _ in attempts_of(the_turn(local))] == ["provider_error"] * 3


# --- a cancel frees the slot (G10) --------------------------------------------------------------------------------------
def test_a_hang_up_frees_its_slot_within_a_second(local, local_server):
    stream = ask(local.openai(), stream=True, extra_body=ENDLESS)
    text = content([next(iter(stream))])
    assert text
    eventually(lambda: busy(local_server) == 1)
    stream.close()
    eventually(lambda: busy(local_server) == 0, timeout=PROMPTLY_S, message="the slot is free")
    turn = the_turn(local)
    assert turn.state == TurnState.CANCELLED
    assert turn.answer.startswith(text)


def test_a_hang_up_before_any_answer_frees_it_too(local, local_server):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "What is git?"}]} | ENDLESS
    client = http.client.HTTPConnection(urlsplit(local.url).netloc, timeout=20)
    headers = {"Authorization": f"Bearer {local.key}", "Content-Type": "application/json"}
    client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    eventually(lambda: busy(local_server) == 1)
    client.close()
    eventually(lambda: busy(local_server) == 0, timeout=PROMPTLY_S, message="the slot is free")
    assert the_turn(local).state == TurnState.CANCELLED


def test_a_cancel_frees_its_slot_and_its_twin_without_one_it_stays_busy(local, local_server):
    """The reader of the native events hangs up, which cancels nothing: the model goes on for another reader."""
    turn = local.take("What is git?", **ENDLESS)["id"]
    with local.reading(turn) as reader:
        begun = list(itertools.islice(reader, 3))
    hung_up_at = time.monotonic()
    with local.reading(turn, after=begun[-1]["id"]) as reader:
        later = list(itertools.takewhile(lambda event: time.monotonic() < hung_up_at + 1.2, reader))
    assert text_of(begun)
    assert text_of(later)
    assert busy(local_server) == 1
    with local.http() as client:
        client.post(f"/api/chat/turns/{turn}/cancel")
    eventually(lambda: busy(local_server) == 0, timeout=PROMPTLY_S, message="the slot is free")
    assert local.wait_ended(turn).state == TurnState.CANCELLED


# --- more turns than slots ----------------------------------------------------------------------------------------------
def test_sixteen_turns_on_four_slots_all_complete(local, local_server):
    """All of them queue at the server: others hold its slots until every turn has sent its request."""
    clients = [local.openai(), *(local.openai(api_key=key) for key in other_keys(local, 3))]
    with contextlib.ExitStack() as others:
        hold_every_slot(local_server, others)
        asked = [in_thread(ask_for_sixteen, client) for client in clients for _ in range(4)]
        eventually(lambda: ChatTurn.objects.count() == 16)
        turns = list(ChatTurn.objects.all())
        eventually(lambda: all(say_their_budgets(turns, local.stack.logs)), message="every attempt has started")
        freed_at = timezone.now()
    assert all(answer(60.0).choices[0].message.content for answer in asked)
    assert [local.wait_ended(str(turn.public_id)).state for turn in turns] == [TurnState.COMPLETED] * 16
    attempts = ChatAttempt.objects.all()
    assert len(attempts) == 16
    assert all(attempt.started_at < freed_at < attempt.first_content_at for attempt in attempts)


def ask_for_sixteen(client):
    return ask(client, max_tokens=16, extra_body={"ignore_eos": True})


def say_their_budgets(turns, logs):
    budgets = "request_timeout_ms=30000 stream_first_content_timeout_ms=30000 stream_idle_timeout_ms=5000"
    return [f"turn={turn.public_id} attempt=1 starts: model=smollm2 {budgets}" in logs for turn in turns]


def hold_every_slot(server, holding):
    """Endless answers, asked of the server itself, until `holding` is left."""
    plain = holding.enter_context(httpx2.Client(trust_env=False, timeout=20.0))
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, http_client=plain)
    for _ in range(SLOTS):
        holding.enter_context(ask(client, stream=True, extra_body=ENDLESS))
    assert busy(server) == SLOTS


def other_keys(chat, count):
    """Keys of further tenants of the same provider: one tenant may not have so many turns at once."""
    return [chat.ending.enter_context(chat_at(chat.stack, chat.provider)).key for _ in range(count)]


def test_its_twin_a_queue_that_is_longer_than_the_request_budget_is_a_timeout(local, local_server):
    """llama.cpp sends its headers with the first token: whoever queues there waits for headers.

    What was given up in its queue never takes a slot: those requests would be endless too.
    """
    turns = [local.take("What is git?", **ENDLESS)["id"] for _ in range(SLOTS)]
    eventually(lambda: busy(local_server) == SLOTS, message="every slot is taken")
    local.provider.request_timeout_ms = 300
    local.provider.save()
    with pytest.raises(openai.InternalServerError) as refused:
        ask(local.openai(), extra_body=ENDLESS)
    assert refused.value.status_code == 504
    late = ChatTurn.objects.exclude(public_id__in=turns).get()
    assert attempts_of(late) == [("transport_error", "headers_timeout")] * 3
    local.provider.request_timeout_ms = 30_000
    local.provider.save()
    waiting = in_thread(lambda: ask(local.openai()))
    with local.http() as client:
        for turn in turns:
            client.post(f"/api/chat/turns/{turn}/cancel")
    assert waiting().choices[0].message.content
    eventually(lambda: busy(local_server) == 0, timeout=PROMPTLY_S, message="every slot is free")
    assert {local.wait_ended(turn).state for turn in turns} == {TurnState.CANCELLED}


# --- a model that is still being loaded ---------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_a_loading_model_is_asked_three_times_and_its_word_passed_on(loading, stream):
    held, chat = loading
    with pytest.raises(openai.InternalServerError) as refused:
        ask(chat.openai(), stream=stream)
    assert held.health() == 503
    assert refused.value.status_code == 503
    assert "Loading model" in refused.value.message
    assert "x-should-retry" not in refused.value.response.headers
    turn = the_turn(chat)
    assert turn.state == TurnState.PROVIDER_ERROR
    assert [state for state, _ in attempts_of(turn)] == ["provider_error"] * 3


def test_a_client_that_tries_again_is_answered_once_the_model_is_loaded(loading):
    held, chat = loading
    asked = in_thread(lambda: ask(chat.openai(max_retries=8)))
    eventually(lambda: ChatTurn.objects.filter(state=TurnState.PROVIDER_ERROR).exists())
    held.release()
    assert asked(40.0).choices[0].message.content
    *refused, last = ChatTurn.objects.order_by("pk").values_list("state", flat=True)
    assert (set(refused), last) == ({TurnState.PROVIDER_ERROR}, TurnState.COMPLETED)


def test_a_turn_outlasts_a_load_that_is_shorter_than_its_pauses(loading):
    """The command runs its turn itself, with pauses as long as a load may take."""
    held, chat = loading
    words = ("manage", "chat", chat.tenant.slug, "What is git?", "--no-knowledge")
    command = Process("loading-chat", *words, CHAT_RETRY_BASE_MS="5000")
    chat.ending.callback(command.end)
    eventually(lambda: "tries again: retry_status" in command.output, timeout=30, message="it was told to wait")
    held.release()
    eventually(lambda: command.returncode is not None, timeout=60, message="the command ends")
    assert command.returncode == 0, command.output
    turn = the_turn(chat)
    assert turn.state == TurnState.COMPLETED
    *refused, last = attempts_of(turn)
    assert {state for state, _ in refused} == {"provider_error"}
    assert last == ("completed", "")
