"""The answer as it grows, what a reader of a broken log has missed, and how events are rendered."""

import json
import uuid
from datetime import UTC, datetime

import pytest

from streaming.http import sse
from streaming.http.openai_shape import Shape, error_of
from streaming.log import events
from streaming.log.answer import Answer, joined
from streaming.log.events import END_SEQ, Event, storable
from streaming.turns.retrieval import question_of, with_excerpts

SHAPE = Shape(uuid.UUID(int=1), "m", datetime(2026, 1, 1, tzinfo=UTC))


def call(arguments, index=0, **fields):
    function = {"arguments": arguments} | ({"name": fields.pop("name")} if "name" in fields else {})
    return {"tool_calls": [{"index": index, "function": function, **fields}]}


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ({"content": "a"}, {"content": "b"}, {"content": "ab"}),
        ({"reasoning_content": "a"}, {"reasoning_content": "b"}, {"reasoning_content": "ab"}),
        ({"content": "a"}, {"reasoning_content": "b"}, None),
        ({"content": "a", "x": 1}, {"content": "b", "x": 1}, None),
        ({"x": 1}, {"x": 2}, None),
        (call("{", id="c", name="f"), call("}"), call("{}", id="c", name="f")),
        (call("{"), call("}", index=1), None),
        (call("{"), call("}", id="another"), None),
    ],
)
def test_what_can_be_joined(first, second, both):
    assert joined(first, second) == both


def folded(*deltas):
    answer = Answer()
    for delta in deltas:
        answer.add(0, delta)
    return answer


def test_joined_or_not_the_answer_is_the_same():
    deltas = [{"content": "a"}, {"content": "b"}, call("{", id="c", name="f"), call("}"), {"audio": {"id": "x"}}]
    both = joined(deltas[0], deltas[1]), joined(deltas[2], deltas[3])
    assert folded(*deltas).choices() == folded(*both, deltas[4]).choices()
    message = folded(*deltas).choices()[0]["message"]
    assert message == {
        "role": "assistant",
        "content": "ab",
        "audio": {"id": "x"},
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


def test_what_a_reader_of_a_broken_log_has_missed():
    deltas = [{"content": "one "}, call("{", id="c", name="f"), {"content": "two"}, call("}"), call("1", 1, id="d")]
    stored = folded(*deltas).choices()
    for seen in range(len(deltas) + 1):
        reader = folded(*deltas[:seen])
        for choice, delta, fields in reader.missing_from(stored):
            reader.add(choice, delta, fields)
        assert reader.choices() == stored
        assert reader.missing_from(stored) == []


def test_what_no_database_takes_is_replaced():
    assert storable({"a\0": ["\ud83d", "\ud83d\ude00", 1, None]}) == {
        "a\N{REPLACEMENT CHARACTER}": ["\N{REPLACEMENT CHARACTER}", "\N{GRINNING FACE}", 1, None]
    }


def test_half_characters_travel_through_the_log():
    payload = events.encode(events.DELTA, 1, {"choice": 0, "offset": 0, "delta": {"content": "\ud83d"}})
    assert events.decode(b"5-0", payload) == Event(
        5, events.DELTA, 1, {"choice": 0, "offset": 0, "delta": {"content": "\ud83d"}}
    )


# --- rendering --------------------------------------------------------------------------------------------------------
def test_a_native_event():
    event = Event(3, "delta", 1, {"choice": 0, "offset": 0, "delta": {"content": "a\nb"}})
    assert sse.native(event) == (
        b'id: 3\nevent: delta\ndata: {"attempt":1,"choice":0,"offset":0,"delta":{"content":"a\\nb"}}\n\n'
    )
    assert sse.native(Event(0, "notice", 0, {})).startswith(b"event: notice\n")


def chunks(*steps, include_usage=False):
    stream = sse.OpenAIStream(SHAPE, include_usage=include_usage)
    said = b"".join(stream.render(Event(1, kind, 1, data)) for kind, data in steps)
    return [json.loads(line[6:]) if b"{" in line else line for line in said.split(b"\n\n") if line]


DELTA = ("delta", {"choice": 0, "offset": 0, "delta": {"content": "a"}})
FINISH = ("finish", {"choice": 0, "finish_reason": "stop"})
END = ("end", {"state": "completed", "error_code": "", "error_kind": ""})


def test_chunks_of_an_openai_stream():
    first, last, done = chunks(("start", {}), DELTA, FINISH, ("usage", {"usage": {"total_tokens": 3}}), END)
    assert first["object"] == "chat.completion.chunk"
    assert first["id"] == "chatcmpl-" + "0" * 31 + "1"
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert done == b"data: [DONE]"


def test_usage_and_sources_and_notices():
    rendered = chunks(
        ("sources", {"sources": [{"number": 1}]}),
        ("notice", {"notice": "no_data", "seconds": 60.0}),
        DELTA,
        FINISH,
        ("usage", {"usage": {"total_tokens": 3}}),
        END,
        include_usage=True,
    )
    assert rendered[0]["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]
    assert rendered[0]["sources"] == [{"number": 1}]
    assert "sources" not in rendered[1]
    assert (rendered[3]["choices"], rendered[3]["usage"]) == ([], {"total_tokens": 3})


def test_an_end_that_is_no_success_is_an_error_and_not_done():
    end = {"state": "idle_timeout", "error_code": "ETIMEDOUT", "error_kind": "silent", "message": "silent for 120 s"}
    rendered = chunks(DELTA, ("end", end))
    assert rendered[-1]["error"]["code"] == "stream_idle_timeout"
    assert len(rendered) == 2


@pytest.mark.parametrize(
    ("state", "kind", "code", "upstream", "status", "may_retry"),
    [
        ("idle_timeout", "silent", "ETIMEDOUT", None, 504, False),
        ("lifetime_exceeded", "wall", "TURN_WALL", None, 504, False),
        ("transport_error", "headers_timeout", "ETIMEDOUT", None, 504, False),
        ("transport_error", "connection_reset", "ECONNRESET", None, 502, False),
        ("protocol_error", "malformed_json", "PROTOCOL_ERROR", None, 502, False),
        ("truncated", "no_finish_reason", "STREAM_TRUNCATED", None, 502, False),
        ("provider_error", "status", "PROVIDER_STATUS", 400, 400, False),
        ("provider_error", "status", "PROVIDER_STATUS", 422, 400, False),
        ("provider_error", "status", "PROVIDER_STATUS", 401, 502, False),
        ("provider_error", "status", "PROVIDER_STATUS", 429, 429, True),
        ("provider_error", "status", "PROVIDER_STATUS", 503, 503, True),
        ("provider_error", "retrieval_timeout", "ETIMEDOUT", None, 504, False),
        ("provider_error", "retrieval", "PROVIDER_UNREACHABLE", None, 502, False),
        ("cancelled", "user", "USER_CANCELLED", None, 499, False),
        ("interrupted", "worker_lost", "WORKER_LOST", None, 503, True),
        ("interrupted", "no_worker", "NO_WORKER", None, 503, False),
        ("interrupted", "internal_error", "INTERNAL_ERROR", None, 500, False),
    ],
)
def test_the_status_of_every_end(state, kind, code, upstream, status, may_retry):
    end = {"state": state, "error_kind": kind, "error_code": code, "status": upstream, "message": ""}
    error = error_of(end)
    assert (error.status, error.may_retry) == (status, may_retry)
    assert ("x-should-retry" in error.headers()) is not may_retry
    assert END_SEQ == 2**53 - 1


# --- what is asked ----------------------------------------------------------------------------------------------------
def test_the_question_is_the_users_last_message():
    assert question_of([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "a"
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "y"}]
    assert question_of([{"role": "user", "content": parts}]) == "x\ny"
    assert question_of([{"role": "system", "content": "a"}]) == ""


def test_excerpts_join_the_clients_own_system_message():
    from embeddings.query.search import SearchHit

    hit = SearchHit("docs", "a.md", 1, 2, 0.5, "text")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    told = with_excerpts(asked, [hit])
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert "[1] docs/a.md, lines 1-2:\ntext" in told[0]["content"]
    assert told[1:] == asked[1:]
    assert with_excerpts(asked, []) == asked
