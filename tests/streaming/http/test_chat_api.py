"""The turn API: events with resume, notices and heartbeats, cancel, tokens, conversations, answers over knowledge."""

import itertools
import time
from datetime import timedelta

from django.utils import timezone

from streaming.log import valkey
from streaming.log.events import END_SEQ, log_key
from streaming.models import ChatTurn, Conversation
from streaming.states import TurnState
from tests.support.chat_stack import text_of
from tests.support.factories import make_generation, make_repository, make_row, make_tenant, make_version
from tests.support.processes import LIMITS
from tests.support.provider_server import Gate, status, vector_of
from tests.support.provider_server.chat_stream import (
    D,
    F,
    R,
    T,
    at_gate,
    data,
    forever,
    silence,
    silence_forever,
    sse,
    usage,
)
from tests.support.threads import in_thread
from tests.support.waiting import PROMPTLY_S


def kinds(events):
    return [event["event"] for event in events if event["event"] not in ("comment", "notice")]


def test_the_events_of_a_turn(chat):
    chat.server.next(sse(R, T("One"), silence(0.05), T(" two"), F, usage(), D))
    turn = chat.take()
    events = chat.events(turn["id"])
    assert kinds(events) == ["start", "attempt", "delta", "delta", "finish", "usage", "end"]
    assert [event["id"] for event in events if event["id"]] == [1, 2, 3, 4, 5, 6, END_SEQ]
    assert [event["offset"] for event in events if event["event"] == "delta"] == [0, 3]
    assert [event["attempt"] for event in events if event["id"]] == [0, 1, 1, 1, 1, 1, 1]
    assert text_of(events) == "One two"
    assert events[-1]["state"] == "completed"
    with chat.http() as client:
        shown = client.get(f"/api/chat/turns/{turn['id']}").json()
    assert (shown["state"], shown["answer"], shown["error"]) == ("completed", "One two", None)
    assert shown["usage"]["total_tokens"] == 12
    assert [attempt["end_state"] for attempt in shown["attempts"]] == ["completed"]


def test_two_readers_see_the_same_and_one_that_comes_back_misses_and_repeats_nothing(chat):
    gate = Gate()
    chat.server.next(sse(R, T("One"), at_gate(gate), T(" two"), silence(0.05), T(" three"), F, D))
    turn = chat.take()
    first = in_thread(chat.events, turn["id"])
    with chat.reading(turn["id"]) as reader:
        begun = [next(reader) for _ in range(3)]
    assert text_of(begun) == "One"
    gate.release()
    rest = chat.events(turn["id"], after=begun[-1]["id"])
    assert [event["id"] for event in begun + rest if event["id"]] == [event["id"] for event in first() if event["id"]]
    assert text_of(begun + rest) == "One two three"


def test_an_event_source_that_has_read_the_end_is_told_to_stop(chat):
    turn = chat.take()
    assert chat.events(turn["id"])[-1]["id"] == END_SEQ
    with chat.http() as client:
        reply = client.get(f"/api/chat/turns/{turn['id']}/events", headers={"Last-Event-ID": str(END_SEQ)})
    assert reply.status_code == 204


def test_after_the_log_is_gone_the_stored_turn_answers(chat):
    turn = chat.take()
    logged = chat.events(turn["id"])
    with valkey.connect() as client:
        assert client.delete(log_key(chat.tenant.pk, turn["id"])) == 1
    stored = chat.events(turn["id"])
    assert text_of(stored) == text_of(logged) == "The gates hold."
    assert kinds(stored) == ["delta", "finish", "usage", "end"]
    resumed = chat.events(turn["id"], after=4)
    assert kinds(resumed) == ["snapshot", "end"]
    assert resumed[0]["choices"][0]["message"]["content"] == "The gates hold."


def test_silence_is_told_before_it_ends_the_attempt_and_heartbeats_go_on(chat):
    chat.provider.stream_idle_timeout_ms = 3_000
    chat.provider.save()
    chat.server.next(sse(R, T("One"), silence_forever()))
    events = chat.events(chat.take()["id"])
    notices = [event for event in events if event["event"] == "notice"]
    assert notices[0]["notice"] == "no_data"
    assert 0.5 < notices[0]["seconds"] < 3
    assert notices[0]["id"] == 0
    assert any(event["event"] == "comment" for event in events)
    assert events[-1]["state"] == "idle_timeout"
    assert events.index(notices[0]) < len(events) - 1


# --- the watchdog and the wall clock -----------------------------------------------------------------------------------
def test_a_silent_stream_ends_within_its_budget_and_its_socket_is_closed_upstream(chat):
    """G10."""
    chat.server.script(lambda call: sse(R, T("kept"), silence_forever()))
    identifier = chat.take()["id"]
    events = chat.events(identifier)
    assert (events[-1]["state"], text_of(events)) == ("idle_timeout", "kept")
    assert chat.server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"
    assert chat.turn(identifier).answer == "kept"


def test_the_twin_of_silence_without_a_watchdog_the_socket_stays_open(chat):
    """G10 broken: every budget disabled, the provider holds the connection for as long as it likes."""
    chat.provider.stream_idle_timeout_ms = chat.provider.request_timeout_ms = 0
    chat.provider.save()
    chat.server.script(lambda call: sse(R, T("kept"), silence_forever()))
    identifier = chat.take()["id"]
    with chat.reading(identifier) as reader:
        heartbeats = [event for event in itertools.islice(reader, 8) if event["event"] == "comment"]
    assert len(heartbeats) >= 4, "it was still silent long after the other test's budget"
    assert chat.server.chat_calls[0].is_open
    with chat.http() as client:
        client.post(f"/api/chat/turns/{identifier}/cancel")
    assert chat.wait_ended(identifier).state == TurnState.CANCELLED


def test_a_turn_meets_its_wall_clock_whatever_its_attempts_do(chat):
    chat.provider.turn_wall_ms = 2_000
    chat.provider.save()
    chat.server.script(lambda call: sse(R, forever(silence(0.03), T("x"))))
    events = chat.events(chat.take()["id"])
    assert (events[-1]["state"], events[-1]["error_kind"]) == ("lifetime_exceeded", "wall")
    assert text_of(events).startswith("xx")


# --- G11: no retry appends to, or repeats, what was delivered -----------------------------------------------------------
def test_after_text_nothing_is_replayed(chat):
    chat.server.next(sse(R, T("Hello wo"), silence_forever()), sse(R, T("Hello world"), F, D))
    events = chat.events(chat.take()["id"])
    assert text_of(events) == "Hello wo"
    assert len(chat.server.chat_calls) == 1


def test_its_twin_before_any_text_it_is(chat):
    chat.server.next(sse(R, silence_forever()), sse(R, T("Hello world"), F, D))
    events = chat.events(chat.take()["id"])
    assert text_of(events) == "Hello world"
    assert kinds(events).count("start") == 1
    assert [event["attempt"] for event in events if event["event"] == "delta"] == [2]
    assert len(chat.server.chat_calls) == 2


# --- cancel -----------------------------------------------------------------------------------------------------------
def test_cancel_closes_the_upstream_socket(chat):
    chat.provider.stream_idle_timeout_ms = 30_000
    chat.provider.save()
    chat.server.next(sse(R, T("One"), silence_forever()))
    turn = chat.take()
    with chat.reading(turn["id"]) as reader, chat.http() as client:
        assert next(event for event in reader if event["event"] == "delta")
        assert client.post(f"/api/chat/turns/{turn['id']}/cancel").status_code == 200
        assert chat.server.wait_until_ended(1, timeout=PROMPTLY_S).ended_by == "client_closed"
        end = next(event for event in reader if event["event"] == "end")
        assert end["state"] == "cancelled"
        again = client.post(f"/api/chat/turns/{turn['id']}/cancel").json()
    assert (again["state"], again["answer"]) == ("cancelled", "One")


def test_it_does_so_within_a_second_and_so_does_a_hang_up(chat):
    """By the server's log, the quicker of two each: a machine that is busy elsewhere only adds to it."""
    chat.provider.stream_idle_timeout_ms = 30_000
    chat.provider.save()
    assert min(seconds_to_close(chat, cancelled) for _ in range(2)) < 1
    assert min(seconds_to_close(chat, hung_up) for _ in range(2)) < 1


def seconds_to_close(chat, leave):
    """Seconds from a client's leaving to the close of the provider's socket."""
    chat.server.next(sse(R, T("One"), silence_forever()))
    left_at = leave(chat)
    call = chat.server.wait_until_ended(chat.server.chat_calls[-1].number)
    assert call.ended_by == "client_closed"
    return call.ended_at - left_at


def cancelled(chat):
    turn = chat.take()
    with chat.reading(turn["id"]) as reader, chat.http() as client:
        assert next(event for event in reader if event["event"] == "delta")
        left_at = time.monotonic()
        client.post(f"/api/chat/turns/{turn['id']}/cancel")
    return left_at


def hung_up(chat):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "stream": True}
    with chat.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert any("One" in line for line in reply.iter_lines())
        left_at = time.monotonic()
    return left_at


def test_a_reader_that_goes_away_does_not_cancel_the_turn(chat):
    gate = Gate()
    chat.server.next(sse(R, T("One"), at_gate(gate), T(" two"), F, D))
    turn = chat.take()
    with chat.reading(turn["id"]) as reader:
        assert next(event for event in reader if event["event"] == "delta")
    gate.release()
    assert chat.wait_ended(turn["id"]).answer == "One two"


# --- tokens, conversations, knowledge ----------------------------------------------------------------------------------
def test_a_turns_own_token_reads_it_and_nothing_else(chat):
    turn, other = chat.take(), chat.take()
    with chat.http("none") as client:
        token = {"token": turn["events_token"]}
        assert client.get(f"/api/chat/turns/{turn['id']}", params=token).status_code == 200
        assert client.get(f"/api/chat/turns/{turn['id']}/events", params=token).status_code == 200
        assert client.get(f"/api/chat/turns/{other['id']}", params=token).status_code == 404
        assert client.get(f"/api/chat/turns/{turn['id']}", params={"token": "made up"}).status_code == 404
        assert client.post(f"/api/chat/turns/{turn['id']}/cancel", params=token).status_code == 401
    chat.wait_ended(other["id"])


def full_of_turns(chat, **fields):
    return ChatTurn.objects.bulk_create(
        ChatTurn(tenant=chat.tenant, provider=chat.provider, model="scripted", request={}, **fields)
        for _ in range(int(LIMITS["CHAT_TURNS_PER_TENANT"]))
    )


def test_a_refused_turn_leaves_no_conversation_behind(chat):
    full_of_turns(chat, state=TurnState.RUNNING, lease_expires_at=timezone.now() + timedelta(minutes=5))
    body = {"messages": [{"role": "user", "content": "?"}], "knowledge": False, "conversation": "new"}
    with chat.http() as client:
        assert client.post("/api/chat/turns", json=body).status_code == 429
    assert not Conversation.objects.exists()
    ChatTurn.objects.all().delete()


def test_turns_whose_worker_is_gone_make_room_for_the_next(chat):
    lost = full_of_turns(chat, state=TurnState.RUNNING, lease_expires_at=timezone.now() - timedelta(minutes=5))
    assert text_of(chat.events(chat.take()["id"])) == "The gates hold."
    states = ChatTurn.objects.filter(pk__in=[turn.pk for turn in lost]).values_list("state", flat=True)
    assert set(states) == {TurnState.INTERRUPTED}


def test_a_turn_in_a_conversation_is_asked_after_those_before_it(chat):
    first = chat.take("What holds?", conversation="new")
    chat.wait_ended(first["id"])
    second = chat.take("And why?", conversation=first["conversation"])
    chat.wait_ended(second["id"])
    assert chat.server.chat_calls[-1].texts == ("What holds?", "The gates hold.", "And why?")
    with chat.http() as client:
        body = {"messages": [{"role": "user", "content": "?"}], "conversation": "nonsense"}
        assert client.post("/api/chat/turns", json=body).status_code == 404


def with_a_row(chat, text="The gates hold back the flood.", tenant=None, path="docs/gates.md"):
    tenant = tenant or chat.tenant
    generation = make_generation(tenant.embedding_provider, dimensions=384)
    repository = make_repository(tenant, slug="docs", live_generation=generation, knowledge_revision=1)
    version = make_version(repository, generation, path=path, is_live=True, row_count=1)
    return make_row(version, text=text, vector=vector_of(text), start_line=3, end_line=9)


def test_an_answer_over_knowledge_is_told_the_rows_and_cites_them(chat):
    row = with_a_row(chat)
    turn = chat.take(row.text, knowledge=True)
    events = chat.events(turn["id"])
    source = {"number": 1, "repository": "docs", "path": "docs/gates.md", "start_line": 3, "end_line": 9, "score": 1.0}
    assert events[1]["event"] == "sources"
    assert events[1]["sources"] == [source]
    assert chat.turn(turn["id"]).sources == [source]
    told = chat.server.chat_calls[-1].body["messages"]
    assert [message["role"] for message in told] == ["system", "user"]
    assert "[1] docs/docs/gates.md, lines 3-9:\nThe gates hold back the flood." in told[0]["content"]


def test_an_openai_client_gets_the_sources_beside_the_answer(chat):
    row = with_a_row(chat)
    ask = {"model": "scripted+knowledge", "messages": [{"role": "user", "content": row.text}]}
    reply = chat.openai().chat.completions.create(**ask)
    assert reply.sources[0]["path"] == "docs/gates.md"
    chunks = list(chat.openai().chat.completions.create(**ask, stream=True))
    assert chunks[0].sources[0]["path"] == "docs/gates.md"


def test_when_the_question_cannot_be_embedded_the_turn_says_so(chat):
    with_a_row(chat)
    chat.server.script(lambda call: status(500) if call.kind == "embedding" else None)
    turn = chat.take(knowledge=True)
    end = chat.events(turn["id"])[-1]
    assert (end["state"], end["error_kind"]) == ("provider_error", "retrieval")
    assert chat.server.chat_calls == []


def test_a_turn_needs_a_model(chat):
    tenant = make_tenant(embedding_provider=None)
    from embeddings.registry import issue_key

    _, key = issue_key(tenant)
    with chat.http(key) as client:
        reply = client.post("/api/chat/turns", json={"messages": [{"role": "user", "content": "?"}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_a_nul_and_half_a_character_do_not_break_the_store(chat):
    half = data('{"id":"x","choices":[{"index":0,"delta":{"content":"a\\u0000b\\ud83d"},"finish_reason":null}]}')
    chat.server.next(sse(R, half, F, D))
    turn = chat.take("with a \0 inside")
    assert chat.events(turn["id"])[-1]["state"] == "completed"
    assert chat.turn(turn["id"]).answer == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
