"""Replies with more than text in their deltas, and what reaches a client of each, for `test_reply_kinds`."""

import json

from tests.support.provider_server import D, F, Packet, R, T, data, delta, finish, sse

PICTURE = {"type": "image_url", "index": 0, "image_url": {"url": "data:image/png;base64,AAAA"}}
CITED = {"type": "url_citation", "url_citation": {"url": "http://a.test/"}}
THOUGHT = {"type": "reasoning.encrypted", "data": "c2VjcmV0", "id": "r1", "format": "x-v1", "index": 0}
OTHER_THOUGHT = {"type": "reasoning.text", "text": "So", "index": 0}
SIGNED = {"google": {"thought_signature": "c2ln"}}


def escaped(fields):
    """A delta in ASCII, as the servers write it that send halves of a character."""
    return data(json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}))


def chunk(choice=None, **fields):
    return data({"choices": [] if choice is None else [{"index": 0, "finish_reason": None, **choice}], **fields})


def call(index, arguments=None, *, name=None, **fields):
    function = ({} if name is None else {"name": name}) | ({} if arguments is None else {"arguments": arguments})
    return escaped({"tool_calls": [{"index": index, "type": "function", "function": function, **fields}]})


def called(name, arguments, **fields):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


MESSAGES = {
    # the steps -> what the message of a whole answer holds
    "pictures alone": ([R, delta({"images": [PICTURE]}), F, D], {"images": [PICTURE]}),
    "pictures, one by one": (
        [R, T("Two"), delta({"images": [PICTURE]}), delta({"images": [PICTURE | {"index": 1}]}), F, D],
        {"content": "Two", "images": [PICTURE, PICTURE | {"index": 1}]},
    ),
    "audio": (
        [
            R,
            delta({"audio": {"id": "a1", "transcript": "Hel"}}),
            delta({"audio": {"id": "a1", "transcript": "lo"}}),
            delta({"audio": {"id": "a1", "data": "UklG"}}),
            delta({"audio": {"data": "Rg==", "expires_at": 1}}),
            F,
            D,
        ],
        {"audio": {"id": "a1", "transcript": "Hello", "data": "UklGRg==", "expires_at": 1}},
    ),
    "annotations": (
        [T("See"), delta({"annotations": [CITED]}), delta({"content": " it", "annotations": [CITED]}), F, D],
        {"content": "See it", "annotations": [CITED, CITED]},
    ),
    "details of reasoning": (
        [delta({"reasoning_details": [OTHER_THOUGHT]}), delta({"reasoning_details": [THOUGHT]}), T("a"), F, D],
        {"content": "a", "reasoning_details": [OTHER_THOUGHT, THOUGHT]},
    ),
    "a field of tomorrow": (
        [delta({"hologram": {"points": [1]}}), delta({"hologram": {"points": [2]}}), F, D],
        {"hologram": {"points": [1, 2]}},
    ),
    "fields that hold nothing": (
        [delta({"content": "", "images": [], "audio": {"data": ""}, "annotations": None}), T("a"), F, D],
        {"content": "a"},
    ),
    "thinking in the parts of the content": (
        [
            delta({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}]}),
            delta({"content": [{"type": "text", "text": "a"}]}),
            F,
            D,
        ],
        {"content": "a", "reasoning_content": "Hm"},
    ),
    "a legacy function call": (
        [
            delta({"function_call": {"name": "f", "arguments": ""}}),
            delta({"function_call": {"arguments": '{"q"'}}),
            delta({"function_call": {"arguments": ": 1}"}}),
            finish("function_call"),
            D,
        ],
        {"function_call": {"name": "f", "arguments": '{"q": 1}'}},
    ),
    "halves of an emoji": (
        [escaped({"content": "a\ud83e"}), escaped({"content": "\udd86b"}), F, D],
        {"content": "a\N{DUCK}b"},
    ),
    "halves with another field between them": (
        [
            escaped({"content": "a\ud83e"}),
            escaped({"reasoning": "x\ud83e"}),
            escaped({"content": "\udd86b"}),
            escaped({"reasoning": "\udd86"}),
            F,
            D,
        ],
        {"content": "a\N{DUCK}b", "reasoning": "x\N{DUCK}"},
    ),
    "half an emoji at the end": ([escaped({"content": "a\ud83e"}), F, D], {"content": "a\N{REPLACEMENT CHARACTER}"}),
    "halves in arguments": (
        [call(0, '"\ud83e', name="f", id="c1"), call(0, '\udd86"'), finish("tool_calls"), D],
        {"tool_calls": [called("f", '"\N{DUCK}"', id="c1")]},
    ),
}

CALLS = {
    # the steps -> the tool calls of a whole answer; an id of None is one that was made here
    "a fresh id with each delta": (
        [call(0, "", name="f", id="c1"), call(0, '{"q"', id="c2"), call(0, ": 1}", id="c3")],
        [called("f", '{"q": 1}', id="c1")],
    ),
    "a fresh id and an empty name with each delta": (
        [call(0, "", name="f", id="c1"), call(0, '{"q"', name="", id="c2"), call(0, ": 1}", name="", id="c3")],
        [called("f", '{"q": 1}', id="c1")],
    ),
    "a new id with a name": (
        [call(0, "{}", name="f", id="c1"), call(0, "[", name="g", id="c2"), call(0, "]", id="c9")],
        [called("f", "{}", id="c1"), called("g", "[]", id="c2")],
    ),
    "no id at all": (
        [call(0, "{", name="f"), call(0, "}"), call(1, "[]", name="g")],
        [called("f", "{}", id=None), called("g", "[]", id=None)],
    ),
    "an id that comes late": ([call(0, "{", name="f"), call(0, "}", id="late")], [called("f", "{}", id=None)]),
    "a thought signature": (
        [call(0, "{}", name="f", id="c1", extra_content=SIGNED)],
        [called("f", "{}", id="c1", extra_content=SIGNED)],
    ),
}

FINISHES = {
    # the finish reasons that come -> the one that is told
    "tool_calls, then stop": (["tool_calls", "stop"], "tool_calls"),
    "function_call, then stop": (["function_call", "stop"], "function_call"),
    "length, then stop": (["length", "stop"], "length"),
    "content_filter, then stop": (["content_filter", "stop"], "content_filter"),
    "stop, then length": (["stop", "length"], "length"),
}

LOGPROBS = {"content": [{"token": "a", "logprob": -0.1}]}
EXTRAS = {
    # the steps -> fields of a whole answer, and of its choice
    "a fingerprint and a tier": (
        [
            chunk({"delta": {"content": "a"}}, system_fingerprint="fp_1", service_tier="default"),
            chunk({"delta": {"content": "b"}, "finish_reason": "stop"}, system_fingerprint="fp_1"),
            D,
        ],
        {"system_fingerprint": "fp_1", "service_tier": "default"},
        {},
    ),
    "what a stop was": (
        [T("a"), chunk({"delta": {}, "finish_reason": "stop", "stop_reason": "END", "matched_stop": 2}), D],
        {},
        {"stop_reason": "END", "matched_stop": 2},
    ),
    "token ids and log probabilities": (
        [
            chunk({"delta": {"content": "a"}, "token_ids": [1], "logprobs": LOGPROBS}),
            chunk({"delta": {"content": "b"}, "token_ids": [2, 3], "logprobs": LOGPROBS}),
            F,
            D,
        ],
        {},
        {"token_ids": [1, 2, 3], "logprobs": {"content": LOGPROBS["content"] * 2}},
    ),
    "citations in each chunk": (
        [chunk({"delta": {"content": text}}, citations=["http://a.test"]) for text in "ab"] + [F, D],
        {"citations": ["http://a.test"]},
        {},
    ),
    "timings with the usage": (
        [T("a"), F, chunk(usage={"total_tokens": 3}, timings={"predicted_ms": 5.5}), D],
        {"timings": {"predicted_ms": 5.5}},
        {},
    ),
    "results of a filter": (
        [
            chunk(prompt_filter_results=[{"prompt_index": 0}]),
            chunk({"delta": {"content": "a"}, "content_filter_results": {"hate": {"severity": "safe"}}}),
            chunk({"delta": {"content": "b"}, "content_filter_results": {"hate": {"severity": "safe"}}}),
            F,
            D,
        ],
        {"prompt_filter_results": [{"prompt_index": 0}]},
        {"content_filter_results": {"hate": {"severity": "safe"}}},
    ),
}

STREAM = [R, T("a"), F, D]
TYPES = {
    "text/plain": sse(*STREAM, content_type="text/plain; charset=utf-8"),
    "application/json": sse(*STREAM, content_type="application/json"),
    "application/octet-stream": sse(*STREAM, content_type="application/octet-stream"),
    "text/plain, one byte first": sse(Packet(b"d"), Packet(R.payload[1:]), *STREAM[1:], content_type="text/plain"),
    "text/plain, a comment first": sse(Packet(b": hello\n\n"), *STREAM, content_type="text/plain"),
    "text/plain, an empty line first": sse(Packet(b"\r\n"), *STREAM, content_type="text/plain"),
}

KEEP_ALIVES = {
    "a comment": b": ping\n\n",
    "empty data": b"data:\n\n",
    "empty data with a space": b"data: \n\n",
    "a word": b"data: ping\n\n",
    "a word in brackets": b"data: [HEARTBEAT]\n\n",
    "a word in quotes": b'data: "keep-alive"\n\n',
    "a comment in data": b"data: : keepalive\n\n",
    "null": b"data: null\n\n",
    "an empty object": b"data: {}\n\n",
    "an empty list": b"data: []\n\n",
    "an object": b'data: {"type": "ping"}\n\n',
    "an object with a time": b'data: {"ping": 1765000000}\n\n',
    "an event": b"event: ping\ndata: {}\n\n",
    "an event with words": b"event: heartbeat\ndata: still here\n\n",
    "an event without data": b"event: keepalive\n\n",
    "no choices": b'data: {"id": "x", "object": "chat.completion.chunk", "choices": []}\n\n',
    "an id": b"id: 7\n\n",
}


def refusal(**fields):
    return json.dumps({"error": {"message": "no", **fields}})
