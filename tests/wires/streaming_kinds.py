"""Odd wires of a model server, and what comes of each, for `test_streaming_kinds` and `test_streaming_kinds_whole`."""

import gzip
import zlib

from tests.support.attempts import then_hang
from tests.support.provider_server import (
    D,
    F,
    Packet,
    R,
    Reply,
    T,
    U,
    block,
    data,
    delta,
    drip,
    event,
    finish,
    forever,
    packets,
    raw,
    silence,
    silence_forever,
    sse,
    status,
)
from tests.support.provider_server.wire import chunk as http_chunk

KEY = "sk-secret-of-ours"
BUDGETS = {
    "stream_idle_timeout_ms": 250,
    "request_timeout_ms": 250,
    "finish_grace_ms": 150,
    "stream_lifetime_ms": 2_000,
}
STILL = silence_forever()
COMPLETED = ("completed", "")
TRUNCATED = ("truncated", "no_finish_reason")
FRAME = ("provider_error", "error_frame")
STATUS = ("provider_error", "status")
NO_DELTA = ("protocol_error", "no_delta")
MALFORMED = ("protocol_error", "malformed_chunk")
NO_JSON = ("protocol_error", "malformed_json")
ENCODED = ("protocol_error", "content_encoding")
NO_STREAM = ("protocol_error", "not_an_event_stream")
BROKEN = ("transport_error", "disconnected")
UNANSWERED = ("transport_error", "headers_timeout")
KEEPALIVE = ("idle_timeout", "keepalive")
SILENT = ("idle_timeout", "silent")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
WHOLE = b"".join(packet.payload for packet in (R, T("a"), F, U, D))


def choice(**fields):
    return data({"choices": [fields]})


def whole(headers=b"", body=WHOLE, line=HEAD):
    """One reply of this head and body."""
    return raw(line + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def chunked(body):
    return raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)


def endlessly(start, part, pause=0.01):
    def play_it(exchange):
        exchange.send(start)
        while True:
            exchange.send(part)
            exchange.wait(pause)

    return Reply("endlessly", play_it)


# --- errors inside a stream, in other shapes ---------------------------------------------------------------------------
FRAMES = {
    # what the frame says -> in the detail, whether the attempt may be made again
    "a string": ({"error": "it broke"}, "it broke", False),
    "a string and a code beside it": ({"error": "slow down", "code": 429}, "slow down", True),
    "detail": ({"detail": "no such model"}, "no such model", False),
    "detail, as a list": ({"detail": [{"msg": "too long"}]}, "too long", False),
    "object": ({"object": "error", "message": "busy", "type": "Busy", "code": 503}, "busy", True),
    "type": ({"type": "error", "message": "it broke"}, "it broke", False),
    "type and error": ({"type": "error", "error": {"type": "overloaded_error", "message": "later"}}, "later", True),
    "message and code": ({"message": "it broke", "code": 500}, "it broke", True),
    "message and a code in words": ({"message": "no", "code": "InvalidParameter"}, "no", False),
    "error_msg": ({"error_code": 336, "error_msg": "it broke"}, "it broke", False),
    "errors": ({"errors": [{"message": "it broke"}]}, "it broke", False),
    "in a list": ([{"error": {"message": "later", "code": 503, "status": "UNAVAILABLE"}}], "later", True),
    "a status as text": ({"error": {"message": "later", "code": "503"}}, "later", True),
    "a code that is an object": ({"error": {"message": "no", "code": {"http": 503}}}, "no", False),
    "beside choices": (
        {"error": {"message": "no", "code": 502}, "choices": [{"delta": {"content": ""}, "finish_reason": "error"}]},
        "no",
        True,
    ),
    "our key in it": ({"error": {"message": f"bad key {KEY}"}}, "bad key ***", False),
    "our key in its code": ({"message": "no", "code": KEY}, "no", False),
}


# --- chunks that are odd, and what they are worth ----------------------------------------------------------------------
EVERY_CHUNK_FINISHES = [step for text in "abcd" for step in (silence(0.1), delta({"content": text}, "stop"))]
SECOND_CHOICE = [T("a"), F, T("b", 1), silence(0.2), T("c", 1), delta({}, "length", 1), D]
WIRES = {
    # the steps, how it ends, its text
    "finish: content_filter": ([R, T("a"), finish("content_filter"), D], COMPLETED, "a"),
    "finish: empty": ([R, delta({"content": "a"}, ""), delta({}, ""), D], TRUNCATED, "a"),
    "finish: the word null": (
        [delta({"content": "a"}, "null"), silence(0.2), delta({"content": "b"}, "stop")],
        COMPLETED,
        "ab",
    ),
    "finish: the word null, cut": ([delta({"content": "a"}, "null"), STILL], SILENT, "a"),
    "finish: a number": ([choice(index=0, delta={"content": "a"}, finish_reason=1), D], TRUNCATED, "a"),
    "finish: in every chunk": ([*EVERY_CHUNK_FINISHES, D], COMPLETED, "abcd"),
    "a choice nobody asked for, later": (SECOND_CHOICE, COMPLETED, "abc"),
    "the same, silent": ([*SECOND_CHOICE[:3], STILL], SILENT, "ab"),
    "the same, its role alone": ([*SECOND_CHOICE[:2], delta({"role": "assistant"}, None, 1), STILL], SILENT, "a"),
    "the same, never finished": ([*SECOND_CHOICE[:3], D], TRUNCATED, "ab"),
    "usage in every chunk": (
        [data({"choices": [{"delta": {"content": "a"}}], "usage": {"n": 1}}), F, D],
        COMPLETED,
        "a",
    ),
    "usage that is none": (
        [T("a"), data({"choices": [], "usage": "much"}), data({"usage": [1]}), F, D],
        COMPLETED,
        "a",
    ),
    "choices: null": ([T("a"), data({"choices": None}), F, D], COMPLETED, "a"),
    "choices: an object": ([T("a"), data({"choices": {"0": 1}}), STILL], MALFORMED, "a"),
    "choices: of null": ([T("a"), data({"choices": [None]}), STILL], MALFORMED, "a"),
    "delta: null": ([choice(delta=None), T("a"), choice(delta=None, finish_reason="stop"), D], COMPLETED, "a"),
    "delta: missing": ([choice(index=0), T("a"), choice(index=0, finish_reason="stop"), D], COMPLETED, "a"),
    "delta: a string": ([choice(delta="a"), F, D], NO_DELTA, ""),
    "delta: a list": ([choice(delta=["a"]), F, D], NO_DELTA, ""),
    "content: a number": ([choice(delta={"content": 5}), F, D], NO_DELTA, ""),
    "content: an object": ([choice(delta={"content": {"text": "a"}}), F, D], NO_DELTA, ""),
    "content: parts": ([choice(delta={"content": [{"type": "text", "text": "a"}]}), F, D], COMPLETED, "a"),
    "tool calls: an object": ([choice(delta={"tool_calls": {"id": "c"}}), F, D], NO_DELTA, ""),
    "a message": ([choice(message={"content": "a"}, finish_reason="stop"), D], NO_DELTA, ""),
    "a message, cut": ([choice(message={"content": "a"})], NO_DELTA, ""),
    "a message after its deltas": ([T("a"), choice(message={"content": "a"}, finish_reason="stop"), D], COMPLETED, "a"),
    "a text completion": ([choice(text="a"), choice(text="", finish_reason="stop"), D], NO_DELTA, ""),
    "index: missing": ([choice(delta={"content": "a"}), choice(delta={}, finish_reason="stop"), D], COMPLETED, "a"),
    "index: null": ([choice(index=None, delta={"content": "a"}), STILL], MALFORMED, ""),
    "index: a string": ([choice(index="0", delta={"content": "a"}), STILL], MALFORMED, ""),
    "index: beyond any": ([T("a"), T("b", 999), STILL], MALFORMED, "a"),
    "index: below zero": ([T("a", -1), STILL], MALFORMED, ""),
    "chunks after [DONE]": ([T("a"), F, D, T("b"), data("{bad")], COMPLETED, "a"),
    "[DONE] twice": ([T("a"), F, D, D], COMPLETED, "a"),
    "[DONE] first": ([D, T("a"), F, D], ("truncated", "no_chunks"), ""),
    "[DONE] without its blank line": ([T("a"), F, packets(b"data:[DONE]")], COMPLETED, "a"),
    "[DONE] with spaces": ([T("a"), F, packets(b"data:  [DONE] \n\n"), STILL], COMPLETED, "a"),
    "[DONE] as JSON": ([T("a"), F, data('"[DONE]"')], COMPLETED, "a"),
    "a number too large for any": ([T("a"), data('{"choices": [], "usage": {"n": 1e999}}'), STILL], NO_JSON, "a"),
    "not a number": ([T("a"), data('{"choices": [], "usage": {"n": NaN}}'), STILL], NO_JSON, "a"),
    "nested deeply": (
        [T("a"), data('{"choices": [], "usage": ' + '{"a":' * 400 + "1" + "}" * 401), STILL],
        NO_JSON,
        "a",
    ),
    "a heartbeat of any JSON": (
        [T("a"), event("ping", "null"), event("ping", [1]), event("beat", 1), F, D],
        COMPLETED,
        "a",
    ),
    "news as a named event": (
        [event("progress", {"detail": "loading", "message": "", "code": 503}), T("a"), F],
        COMPLETED,
        "a",
    ),
    "null as a chunk": ([T("a"), data("null"), F, D], COMPLETED, "a"),
    "event: error without words": ([T("a"), block("event: error", "data:"), STILL], FRAME, "a"),
    "event: error, a string": ([T("a"), event("error", '"no"'), STILL], FRAME, "a"),
    "event: message": ([Packet(b"event: message\n" + each.payload) for each in (R, T("a"), F, D)], COMPLETED, "a"),
    "another API's events": ([event("message_start", {"type": "message_start"}), D], ("truncated", "no_chunks"), ""),
    "JSON lines": ([packets(b'{"choices": []}\n{"choices": []}\n')], ("truncated", "no_chunks"), ""),
    "blanks for ever": ([T("a"), forever(silence(0.02), packets(b"data:  \n\n"))], KEEPALIVE, "a"),
    "pings in JSON for ever": ([T("a"), forever(silence(0.02), data({"type": "ping"}))], KEEPALIVE, "a"),
    "line ends for ever": ([T("a"), forever(silence(0.02), packets(b"\n"))], KEEPALIVE, "a"),
    "half an event for ever": ([T("a"), forever(silence(0.02), packets(b"d"))], KEEPALIVE, "a"),
    "20,000 deltas": ([packets(T("x").payload * 20_000), F, D], COMPLETED, "x" * 20_000),
}


# --- replies and connections -------------------------------------------------------------------------------------------
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n"
REPLIES = {
    "gzip": (whole(b"Content-Encoding: gzip\r\n", gzip.compress(WHOLE)), COMPLETED),
    "deflate": (whole(b"Content-Encoding: deflate\r\n", zlib.compress(WHOLE)), COMPLETED),
    "gzip that is none": (whole(b"Content-Encoding: gzip\r\n"), ENCODED),
    "gzip of one endless line": (
        whole(b"Content-Encoding: gzip\r\n", gzip.compress(b"data: " + b"x" * 50_000_000)),
        ("protocol_error", "line_too_long"),
    ),
    "an encoding we cannot undo": (whole(b"Content-Encoding: br\r\n", b"\x0b\x02\x80"), ENCODED),
    "a made-up encoding": (whole(b"Content-Encoding: gzip, rot13\r\n"), ENCODED),
    "content type in odd case": (sse(R, T("a"), F, D, content_type='Text/EVENT-Stream ; Charset="UTF-8"'), COMPLETED),
    "content type twice": (whole(b"Content-Type: text/event-stream\r\n"), COMPLETED),
    "no content type": (whole(line=b"HTTP/1.1 200 OK\r\n"), COMPLETED),
    "201": (whole(line=HEAD.replace(b"200 OK", b"201 Created")), COMPLETED),
    "204": (raw(NO_CONTENT + b"\r\n"), NO_STREAM),
    "304": (raw(b"HTTP/1.1 304 Not Modified\r\n\r\n"), STATUS),
    "302 to nowhere": (status(302, ""), STATUS),
    "101": (raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), BROKEN),
    "999": (raw(b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n"), STATUS),
    "HTTP/1.0": (raw(HEAD.replace(b"1.1", b"1.0") + b"\r\n" + WHOLE), COMPLETED),
    "no HTTP": (raw(WHOLE), BROKEN),
    "a TLS alert": (raw(b"\x15\x03\x01\x00\x02\x02\x28"), BROKEN),
    "100 and 103 first": (
        raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\n\r\n" + HEAD + b"\r\n" + WHOLE),
        COMPLETED,
    ),
    "100 for ever": (endlessly(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), UNANSWERED),
    "headers for ever": (endlessly(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"), UNANSWERED),
    "a flood of headers": (endlessly(b"HTTP/1.1 200 OK\r\n", b"A: " + b"b" * 50_000 + b"\r\n", 0.001), BROKEN),
    "an error body, drop by drop": (drip(status(500, "x" * 10_000), 0.01, at_once=100), UNANSWERED),
    "extensions and trailers": (chunked(b"%x;a=b\r\n%b\r\n0\r\nT: 1\r\n\r\n" % (len(WHOLE), WHOLE)), COMPLETED),
    "a chunk size that is none": (chunked(b"zz\r\nabc"), BROKEN),
    "a chunk size below zero": (then_hang(HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc"), BROKEN),
    "a chunk that is all there is": (
        then_hang(HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFF\r\n" + WHOLE),
        COMPLETED,
    ),
    "a length that is none": (whole(b"Content-Length: x\r\n"), BROKEN),
    "a length too long": (raw(HEAD + b"Content-Length: 99999\r\n\r\n" + WHOLE), COMPLETED),
    "a length too short": (raw(HEAD + b"Content-Length: 250\r\n\r\n" + WHOLE), ("truncated", "incomplete_event")),
    "a length and chunks": (
        raw(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + http_chunk(WHOLE) + b"0\r\n\r\n"),
        COMPLETED,
    ),
}


SAID = {
    # the reply -> what its error says
    "nothing": (status(500, ""), ""),
    "a page": (status(502, f"<h1>Bad {KEY}</h1>", content_type="text/html"), "<h1>Bad ***</h1>"),
    "bytes": (status(500, bytes(range(128, 256)), content_type="application/octet-stream"), None),
    "no message": (status(400, {"error": {"code": "x"}}), '{"error":{"code":"x"}}'),
    "a string": (status(400, {"error": f"no {KEY}"}), '{"error":"no ***"}'),
    "a list": (status(400, [1, 2]), "[1,2]"),
    "a charset that it has not": (status(400, "{}", content_type="application/json; charset=utf-16"), "{}"),
    "a charset that there is not": (status(400, "no", content_type="text/plain; charset=klingon"), "no"),
    "gzip that is none": (raw(b"HTTP/1.1 429 No\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nno"), ""),
    "an encoding we cannot undo": (raw(b"HTTP/1.1 429 No\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\nno"), ""),
    "a great deal, compressed": (
        status(500, gzip.compress(b"x" * 20_000_000), headers={"Content-Encoding": "gzip"}),
        "x" * 300,
    ),
}


WISHES = {
    "date": ("Wed, 21 Oct 2099 07:28:00 GMT", 2**31 - 1),
    "huge": ("9" * 50, 2**31 - 1),
    "words": ("soon", None),
    "negative": ("-5", None),
    "a date gone by": ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
}


# --- what is kept and sent on of odd deltas ----------------------------------------------------------------------------
def call(index=None, **fields):
    return fields | ({} if index is None else {"index": index})


def function(name, arguments):
    return {"name": name, "arguments": arguments}


CALLS = {
    # the tool_calls of each delta -> (name, arguments) of each call
    "arguments as an object": ([[call(0, id="a", function=function("f", {"x": 1}))]], [("f", '{"x": 1}')]),
    "numbered by nobody": (
        [[call(id="a", function=function("f", "{}")), call(id="b", function=function("g", "[]"))]],
        [("f", "{}"), ("g", "[]")],
    ),
    "numbered by nobody, one by one": (
        [
            [call(id="a", function=function("f", "{"))],
            [call(function={"arguments": "}"})],
            [call(id="b", function=function("g", ""))],
        ],
        [("f", "{}"), ("g", "")],
    ),
    "all of them numbered 0": (
        [
            [call(0, id="a", function=function("f", "{"))],
            [call(0, function={"arguments": "}"})],
            [call(0, id="b", function=function("g", "["))],
            [call(0, function={"arguments": "]"})],
        ],
        [("f", "{}"), ("g", "[]")],
    ),
    "its id in every delta": (
        [[call(0, id="a", function=function("f", "{"))], [call(0, id="a", function={"arguments": "}"})]],
        [("f", "{}")],
    ),
    "an index that is none": ([[call("0", id="a", function=function("f", "{}"))]], [("f", "{}")]),
    "what is no call": ([[None, 1, call(0, id="a", function=function("f", "{}"))]], [("f", "{}")]),
    "a function that is none": ([[call(0, id="a", function="f")]], [("", "")]),
}


ODD_FIELDS = {
    # what one choice holds -> what is kept of its message, and of its log probabilities
    "a refusal that is an object": ({"delta": {"content": "a", "refusal": {"x": 1}}}, {"content": "a"}, None),
    "reasoning in parts": (
        {"delta": {"reasoning_content": [{"type": "text", "text": "hm"}]}},
        {"content": None, "reasoning_content": "hm"},
        None,
    ),
    "log probabilities in a list": ({"delta": {"content": "a"}, "logprobs": [1]}, {"content": "a"}, [1]),
    "log probabilities in words": (
        {"delta": {"content": "a"}, "logprobs": {"content": "b", "tokens": [1]}},
        {"content": "a"},
        {"content": "b", "tokens": [1]},
    ),
    "a field nobody knows": (
        {"delta": {"content": "a", "audio": {"id": "x"}, "refusal": "no"}},
        {"content": "a", "audio": {"id": "x"}, "refusal": "no"},
        None,
    ),
}
