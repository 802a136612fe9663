"""Chunks -> deltas: what counts as delivered, what an error frame is, and when an answer is complete."""

import json

import pytest

from streaming.upstream.chunks import MOST_CHOICES, ChunkReader
from streaming.upstream.errors import ProtocolError, ProviderFrameError, StreamTruncatedError
from streaming.upstream.sse_decoder import IncompleteSseEvent, SseEvent


def event(value, type=""):
    return SseEvent(type, value if isinstance(value, str) else json.dumps(value), "")


def chunk(delta, finish_reason=None, index=0, **fields):
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}], **fields})


def read(*events, **request):
    """The reader, and all deltas as (index, fields)."""
    reader, found = ChunkReader(request), []
    for each in events:
        found += [(delta.index, delta.said) for delta in reader.read(each) or []]
    return reader, found


CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": ""}}
DELIVERED = [
    ({"content": "a"}, {"content": "a"}),
    ({"role": "assistant", "content": "a"}, {"content": "a"}),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "ab"}),
    ({"reasoning_content": "hm"}, {"reasoning_content": "hm"}),
    ({"reasoning": "hm", "content": ""}, {"reasoning": "hm"}),
    ({"refusal": "no"}, {"refusal": "no"}),
    ({"tool_calls": [CALL]}, {"tool_calls": [CALL]}),
    ({"content": "a", "refusal": "no", "reasoning": "hm"}, {"content": "a", "refusal": "no", "reasoning": "hm"}),
    ({"function_call": {"name": "look_up"}}, {"function_call": {"name": "look_up"}}),
]


@pytest.mark.parametrize(("delta", "expected"), DELIVERED)
def test_text_reasoning_refusal_and_tool_calls_are_delivered(delta, expected):
    reader, found = read(chunk(delta))
    assert found == [(0, expected)]
    assert reader.delivered


NOT_DELIVERED = [
    {},
    None,
    {"role": "assistant"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None},
    {"content": "", "reasoning_content": "", "refusal": None, "tool_calls": []},
    {"tool_calls": [{"index": 0, "type": "function", "function": {"arguments": ""}}]},
    {"tool_calls": None, "function_call": None},
    {"tool_calls": "nonsense", "reasoning": {"odd": 1}},
]


@pytest.mark.parametrize("delta", NOT_DELIVERED)
def test_a_role_only_or_empty_chunk_is_a_chunk_and_not_delivered(delta):
    reader, found = read(chunk(delta))
    assert (found, reader.chunks, reader.delivered) == ([], 1, False)


@pytest.mark.parametrize(
    "heartbeat",
    [
        event(""),
        event(" "),
        event("ping", type="ping"),
        event({"type": "ping"}, type="ping"),
        event({}),
        event({"type": "ping"}),
        event({"choices": None}),
    ],
)
def test_a_heartbeat_is_no_chunk(heartbeat):
    reader = ChunkReader()
    assert reader.read(heartbeat) is None
    assert reader.chunks == 0


def test_a_named_event_with_choices_is_a_chunk():
    _, found = read(SseEvent("completion", json.dumps({"choices": [{"delta": {"content": "a"}}]}), ""))
    assert found == [(0, {"content": "a"})]


def test_the_providers_own_fields_survive():
    reader = ChunkReader()
    logprobs = {"content": [{"token": "a"}]}
    sent = {"id": "c1", "odd": 1, "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": logprobs}]}
    (delta,) = reader.read(event(sent))
    assert (delta.chunk_fields, delta.choice_fields) == ({"odd": 1}, {"logprobs": logprobs})
    (plain,) = reader.read(chunk({"content": "b"}, odd=1))
    assert (plain.chunk_fields, plain.choice_fields) == ({}, {})
    assert reader.reply_fields == {"odd": 1}


FRAMES = [
    (event({"error": {"message": "boom", "code": 502}}), "boom", None, 502),
    (event({"error": {"message": "boom", "code": "503"}}), "boom", None, 503),
    (event({"error": {"message": "boom", "code": "rate_limit_exceeded"}}), "boom", "rate_limit_exceeded", None),
    (event({"error": {"message": "boom", "type": "server_error", "code": None}}), "boom", "server_error", None),
    (event({"error": "boom"}), "boom", None, None),
    (event({"error": {"odd": 1}}), '{"odd": 1}', None, None),
    (event({"object": "error", "message": "boom", "code": 400}), "boom", None, 400),
    (event({"error": {"message": "boom"}, "choices": []}), "boom", None, None),
    (event("plain words", type="error"), "plain words", None, None),
    (event({"message": "boom"}, type="error"), "boom", None, None),
    (event("", type="error"), "", None, None),
    (event("[1]", type="error"), "[1]", None, None),
    (chunk({"content": "Requests are too many"}, "error_finish"), "Requests are too many", "error_finish", None),
    (event({"choices": [{"finish_reason": "error", "error": {"message": "gone", "code": 502}}]}), "gone", None, 502),
]


@pytest.mark.parametrize(("frame", "detail", "code", "status"), FRAMES)
def test_an_error_frame_is_the_providers_error(frame, detail, code, status):
    with pytest.raises(ProviderFrameError) as caught:
        read(chunk({"role": "assistant"}), frame)
    assert (caught.value.detail, caught.value.provider_code, caught.value.status) == (detail, code, status)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ('{"choices": [', "malformed_json"),
        ("hello", "malformed_json"),
        ('{"choices": NaN}', "malformed_json"),
        ("[" * 100_000, "malformed_json"),
        ('{"choices": [' + "9" * 5_000 + "]}", "malformed_json"),
        ("[1]", "malformed_chunk"),
        ('"text"', "malformed_chunk"),
        ('{"choices": 1}', "malformed_chunk"),
        ('{"choices": [1]}', "malformed_chunk"),
        ('{"choices": [{"index": "0"}]}', "malformed_chunk"),
        ('{"choices": [{"index": -1}]}', "malformed_chunk"),
        (f'{{"choices": [{{"index": {MOST_CHOICES}}}]}}', "malformed_chunk"),
    ],
)
def test_what_is_no_chunk_is_a_protocol_error(data, kind):
    with pytest.raises(ProtocolError) as caught:
        read(event(data))
    assert caught.value.error_kind == kind
    assert data[:10] not in caught.value.detail


def test_half_a_character_becomes_a_replacement_and_a_whole_one_stays():
    _, found = read(event('{"choices": [{"delta": {"content": "a\\ud83d"}, "finish_reason": "stop"}]}'))
    assert found == [(0, {"content": "a�"})]
    _, found = read(event('{"choices": [{"delta": {"content": "\\uD83E\\uDD86"}}]}'))
    assert found == [(0, {"content": "🦆"})]


T, F = chunk({"content": "a"}), chunk({}, "stop")
DONE = event("[DONE]")
U = event({"choices": [], "usage": {"total_tokens": 3}})
ENDINGS = [
    # events, choices wanted, lenient -> what is missing
    ([T, F], 1, False, None),
    ([T, F, U, DONE], 1, False, None),
    ([F], 1, False, None),
    ([T], 1, False, "no_finish_reason"),
    ([T, DONE], 1, False, "no_finish_reason"),
    ([T, DONE], 1, True, None),
    ([T], 1, True, "no_finish_reason"),
    ([], 1, False, "no_chunks"),
    ([DONE], 1, True, "no_chunks"),
    ([U, DONE], 1, False, "no_content"),
    ([U, DONE], 1, True, "no_content"),
    ([chunk({"role": "assistant"})], 1, False, "no_content"),
    ([T, F], 2, False, "no_finish_reason"),
    ([T, F, DONE], 2, False, None),
    ([T, chunk({"content": "b"}, "stop", index=1)], 2, False, "no_finish_reason"),
    ([T, F, chunk({"content": "b"}, "length", index=1)], 2, False, None),
]


@pytest.mark.parametrize(("events", "choices", "lenient", "missing"), ENDINGS)
def test_an_answer_is_complete_once_every_choice_has_its_finish(events, choices, lenient, missing):
    reader, _ = read(*events, n=choices)
    fault = reader.fault(lenient=lenient)
    assert (fault and fault.error_kind) == missing


def test_finish_reasons_and_usage_are_kept_per_choice():
    reader, _ = read(F, chunk({}, "length", index=1), chunk({}, "", index=2), U, n=3)
    assert (reader.finish_reasons, reader.usage, reader.is_finished) == (
        {0: "stop", 1: "length"},
        {"total_tokens": 3},
        False,
    )


def test_a_whole_event_without_its_blank_line_counts_and_a_cut_one_is_a_truncation():
    reader = ChunkReader()
    assert reader.read_incomplete(IncompleteSseEvent(b"", T.data.encode()))[0].text == "a"
    for cut in (T.data.encode()[:-1], b"\xc3", b"[DON"):
        with pytest.raises(StreamTruncatedError) as caught:
            reader.read_incomplete(IncompleteSseEvent(b"", cut))
        assert caught.value.error_kind == "incomplete_event"
