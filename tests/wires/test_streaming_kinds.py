"""Kinds of wires beyond those of `test_streaming_cases`: other errors, frames, framings, encodings, connections.

Each row of a table in `streaming_kinds` is one wire, and how an attempt at it ends. Those whose fault would show later, in
what is stored or sent on, are played through the whole path in `test_streaming_kinds_whole`.
"""

import asyncio
import json
import socket
import threading

import pytest

from streaming.log.answer import Answer
from streaming.log.recorder import Recorder
from tests.support.attempts import QUESTION, attempt, config_of, ended_by, play, then_close
from tests.support.bare_server import bare_server
from tests.support.provider_server import D, F, R, data, delta, finish, sse, status
from tests.support.strict_loop import run
from tests.support.waiting import PROMPTLY_S, eventually
from tests.wires.streaming_kinds import (
    BUDGETS,
    CALLS,
    COMPLETED,
    FRAME,
    FRAMES,
    KEY,
    NO_STREAM,
    ODD_FIELDS,
    REPLIES,
    SAID,
    STATUS,
    STILL,
    UNANSWERED,
    WIRES,
    WISHES,
    choice,
    whole,
)


@pytest.mark.parametrize(("frame", "said", "retried"), FRAMES.values(), ids=FRAMES.keys())
def test_an_error_in_a_stream_is_the_providers_error_whatever_its_shape(server, frame, said, retried):
    played = play(server, R, data(frame), STILL, api_key=KEY, **BUDGETS)
    assert (played.end, played.retried) == (FRAME, retried)
    assert said in played.result.detail
    assert KEY not in repr(vars(played.result.error))
    assert ended_by(server) == "client_closed"


@pytest.mark.parametrize(("steps", "end", "text"), WIRES.values(), ids=WIRES.keys())
def test_an_odd_stream_has_an_honest_end(server, steps, end, text):
    played = play(server, *steps, **BUDGETS)
    assert (played.end, played.text) == (end, text)
    assert (played.result.error is None) == (end == COMPLETED)
    assert server.wait_until_ended(server.chat_calls[-1].number, timeout=PROMPTLY_S)


@pytest.mark.parametrize(("reply", "end"), REPLIES.values(), ids=REPLIES.keys())
def test_an_odd_reply_has_an_honest_end(server, reply, end):
    played = play(server, reply, **BUDGETS)
    assert played.end == end
    assert played.text == ("a" if end == COMPLETED else "")
    assert server.wait_until_ended(server.chat_calls[-1].number, timeout=PROMPTLY_S)
    assert len(server.chat_calls) == 1


@pytest.mark.parametrize(("reply", "said"), SAID.values(), ids=SAID.keys())
def test_an_error_reply_keeps_its_status_whatever_its_body(server, reply, said):
    played = play(server, reply, api_key=KEY, **BUDGETS | {"request_timeout_ms": 2_000})
    assert played.end == STATUS
    assert played.result.waited_ms < 1_000
    assert said is None or played.result.error.detail == said
    assert KEY not in played.result.detail


def test_a_key_cut_by_the_length_limit_is_not_shown(server):
    for before in range(180, 202):
        played = play(server, status(200, "x" * before + KEY, content_type="text/html"), api_key=KEY)
        assert played.end == NO_STREAM
        assert KEY[:3] not in played.result.detail


@pytest.mark.parametrize(("wish", "expected"), WISHES.values(), ids=WISHES.keys())
def test_a_retry_after_fits_its_column(server, wish, expected):
    played = play(server, status(429, headers={"Retry-After": wish}))
    assert played.result.classification.retry_after_ms == expected


def rejects(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def answers_at_once(connection):
    connection.sendall(b"HTTP/1.1 413 No\r\nContent-Length: 9\r\nConnection: close\r\n\r\ntoo large")
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65_536):
        pass


BARE = {
    "a reset at once": (rejects, QUESTION, ("transport_error", "connection_reset")),
    "a FIN at once": (lambda connection: connection.shutdown(socket.SHUT_RDWR), QUESTION, None),
    "an answer before the request": (answers_at_once, QUESTION | {"pad": "x" * 8_000_000}, STATUS),
}


@pytest.mark.parametrize(("answer", "request_", "end"), BARE.values(), ids=BARE.keys())
def test_a_connection_whose_request_is_never_read(server, answer, request_, end):
    with bare_server(answer) as there:
        asked = config_of(server, base_url=f"{there}/v1", **BUDGETS | {"request_timeout_ms": 3_000})
        played = run(then_close(attempt(asked, request_)))
    assert played.end == end or (end is None and played.result.end_state == "transport_error")
    assert played.result.error_code in ("PROVIDER_STATUS", "ECONNRESET", "EPIPE")


def test_a_request_that_is_never_read_is_under_the_request_budget(server):
    server.accept_never()
    played = run(then_close(attempt(config_of(server, **BUDGETS), QUESTION | {"pad": "x" * 20_000_000})))
    assert played.end == UNANSWERED


ADDRESSES = {
    # TLS is spoken where there is none -> what comes of it
    "no such host": ("http://nowhere.invalid/v1", None, ("transport_error", "unreachable")),
    "no TLS there": (None, b"HTTP/1.1 400 Bad Request\r\n\r\n", ("transport_error", "tls_failed")),
    "a handshake that never ends": (None, b"", UNANSWERED),
}


@pytest.mark.parametrize(("base_url", "said", "end"), ADDRESSES.values(), ids=ADDRESSES.keys())
def test_an_address_without_a_server(server, base_url, said, end):
    closed = threading.Event()

    def answer(connection):
        connection.sendall(said)
        while connection.recv(65_536):
            pass
        closed.set()

    with bare_server(answer) as there:
        asked = config_of(server, base_url=base_url or there.replace("http:", "https:") + "/v1", **BUDGETS)

        async def main():
            played = await attempt(asked)
            assert base_url or await asyncio.to_thread(closed.wait, 1.0), "its socket is still open"
            return played

        assert run(then_close(main())).end == end


def test_a_connection_closed_by_the_server_between_two_attempts_is_not_used(server):
    server.next(whole())

    async def main():
        assert (await attempt(config_of(server))).end == COMPLETED
        await asyncio.to_thread(eventually, lambda: server.open_connections == 0)
        assert (await attempt(config_of(server))).end == COMPLETED
        assert server.connections_accepted == 2

    run(then_close(main()))


def test_cookies_are_not_kept(server):
    """One client serves every tenant of a provider."""
    server.next(whole(b"Set-Cookie: session=of-the-first; Path=/\r\n"))

    async def main():
        assert (await attempt(config_of(server))).end == COMPLETED
        # Its server closes it: the next one must not meet that half-way.
        await asyncio.to_thread(eventually, lambda: server.open_connections == 0)
        assert (await attempt(config_of(server))).end == COMPLETED

    run(then_close(main()))
    assert [call.headers.get("cookie") for call in server.chat_calls] == [None, None]


async def recorded(server):
    """The answer as it is kept, from the deltas of one attempt."""
    heard = []

    class Log:
        def append(self, kind, number, entry):
            heard.append(json.loads(json.dumps(entry)))
            return 1

    recorder = Recorder(Log(), 1_000_000)
    for found in (await attempt(config_of(server))).deltas:
        recorder.delta(found)
    recorder.flush()
    return recorder.answer, heard


@pytest.mark.parametrize(("deltas", "calls"), CALLS.values(), ids=CALLS.keys())
def test_tool_calls_come_out_as_the_api_has_them(server, deltas, calls):
    server.next(sse(R, *[delta({"tool_calls": each}) for each in deltas], finish("tool_calls"), D))
    answer, heard = run(then_close(recorded(server)))
    (kept,) = answer.choices()
    assert [
        (each["function"]["name"], each["function"]["arguments"]) for each in kept["message"]["tool_calls"]
    ] == calls
    assert Answer().missing_from([kept])
    seen = {each["index"] for entry in heard for each in entry["delta"]["tool_calls"]}
    assert seen == set(range(len(calls)))


@pytest.mark.parametrize(("fields", "message", "logprobs"), ODD_FIELDS.values(), ids=ODD_FIELDS.keys())
def test_a_field_of_another_type_breaks_nothing(server, fields, message, logprobs):
    server.next(sse(R, choice(index=0, **fields), choice(index=0, **fields | {"delta": {}}), F, D))
    answer, _ = run(then_close(recorded(server)))
    (kept,) = answer.choices()
    assert kept["message"] == {"role": "assistant"} | message
    assert kept.get("logprobs") == logprobs
    ((_, rest, _),) = Answer().missing_from([kept])
    assert rest.keys() <= message.keys()
