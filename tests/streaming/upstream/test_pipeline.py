"""One attempt, from the wire: every way in which a model server's stream goes, and what comes of it."""

import asyncio
import contextlib
import logging
import time

import pytest

from streaming.upstream.pipeline import open_attempt
from streaming.upstream.retry import RetryKind
from tests.support.attempts import QUESTION, attempt, config_of, ended_by, play, then_close, then_hang
from tests.support.provider_server import (
    A,
    D,
    F,
    Gate,
    ProviderServer,
    R,
    T,
    U,
    Z,
    at_gate,
    block,
    bom,
    bytewise,
    close_without_answer,
    comment,
    data,
    delta,
    endless_line,
    event,
    fin,
    fin_inside_chunk,
    finish,
    forever,
    framed,
    hang,
    json_reply,
    packets,
    repeat,
    reset,
    rst,
    silence,
    silence_forever,
    split,
    sse,
    status,
    unterminated,
    unused_address,
    with_id,
)
from tests.support.strict_loop import run
from tests.support.waiting import PROMPTLY_S

IDLE_MS = 120
IMPATIENT = {"stream_idle_timeout_ms": IDLE_MS, "request_timeout_ms": 10_000}


@pytest.fixture
def server():
    with ProviderServer() as running:
        yield running


# --- silence, and what only looks like activity --------------------------------------------------------------------
def test_a_silent_stream_ends_within_its_budget_and_its_socket_is_closed(server):
    played = play(server, silence_forever(), **IMPATIENT)
    assert played.end == ("idle_timeout", "silent")
    assert (played.result.chunks, played.result.bytes, played.result.transport_code) == (0, 0, "ETIMEDOUT")
    assert IDLE_MS <= played.result.waited_ms < 2_000
    assert ended_by(server) == "client_closed"
    assert played.retried


def test_without_a_watchdog_the_silent_stream_holds_its_connection(server):
    """The twin."""
    server.next(sse(R, silence_forever()))

    async def main():
        task = asyncio.create_task(attempt(config_of(server, stream_idle_timeout_ms=0)))
        done, _ = await asyncio.wait({task}, timeout=5 * IDLE_MS / 1000)
        assert not done
        assert server.chat_calls[-1].is_open
        task.cancel()
        await asyncio.wait({task})

    run(then_close(main()))


def test_a_request_that_is_never_answered_is_one_request_and_a_headers_timeout(server):
    played = play(server, hang(), request_timeout_ms=IDLE_MS)
    assert played.end == ("transport_error", "headers_timeout")
    assert played.retried
    assert ended_by(server) == "client_closed"
    assert len(server.chat_calls) == 1


def test_an_error_reply_whose_body_never_comes_is_under_the_request_budget(server):
    head = b"HTTP/1.1 500 no\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    server.next(then_hang(head))
    played = run(then_close(attempt(config_of(server, request_timeout_ms=IDLE_MS))))
    assert played.end == ("transport_error", "headers_timeout")


def test_a_role_only_chunk_does_not_end_the_wait_for_the_first_content(server):
    played = play(
        server, R, silence(2.5 * IDLE_MS / 1000), T("late"), F, D, **IMPATIENT, stream_first_content_timeout_ms=9_000
    )
    assert (played.end, played.text) == (("completed", ""), "late")
    assert played.result.first_content_ms > IDLE_MS
    assert played.result.first_content_at is not None


def test_a_role_only_chunk_does_not_forbid_a_replay(server):
    played = play(server, R, silence_forever(), **IMPATIENT)
    assert (played.end, played.deltas, played.result.chunks) == (("idle_timeout", "silent"), [], 1)
    assert played.retried


def test_silence_after_text_keeps_the_text_and_forbids_a_replay(server):
    played = play(server, R, T("Hello wo"), silence_forever(), **IMPATIENT)
    assert (played.end, played.text, played.retried) == (("idle_timeout", "silent"), "Hello wo", False)


def test_tool_arguments_that_are_buffered_for_too_long_are_not_replayed(server):
    steps = [R, *(T("t") for _ in range(5)), A("", id="call_1", name="look_up")]
    played = play(server, *steps, silence_forever(), **IMPATIENT)
    assert (played.end, played.text, played.retried) == (("idle_timeout", "silent"), "ttttt", False)
    patient = play(server, *steps, silence(0.2), A('{"q": 1}'), finish("tool_calls"), D)
    assert (patient.end, patient.result.finish_reasons) == (("completed", ""), {0: "tool_calls"})
    calls = [call for found in patient.deltas for call in found.said.get("tool_calls", [])]
    assert calls[-1]["function"]["arguments"] == '{"q": 1}'


def test_two_hundred_arguments_each_within_the_budget_never_time_out(server):
    played = play(server, R, repeat(200, A("x"), silence(0.004)), finish("tool_calls"), D, stream_idle_timeout_ms=300)
    assert (played.end, len(played.deltas)) == (("completed", ""), 200)
    assert played.result.waited_ms > 600


@pytest.mark.parametrize("step", [Z("thinking"), T("x")], ids=["reasoning", "text"])
def test_activity_for_ever_ends_with_the_lifetime_under_its_own_name(server, step):
    played = play(server, R, forever(step, silence(0.03)), stream_lifetime_ms=400)
    assert played.end == ("lifetime_exceeded", "attempt")
    assert not played.retried
    assert played.result.delivered
    assert ended_by(server) == "client_closed"


def test_comments_for_ever_do_not_keep_a_stream_alive(server):
    played = play(server, R, T("a"), forever(silence(0.02), comment()), **IMPATIENT)
    assert (played.end, played.text) == (("idle_timeout", "keepalive"), "a")
    assert "kept alive by comments" in played.result.detail
    assert played.result.comments > 2


HEARTBEATS = {
    "named": event("ping", {"type": "ping"}),
    "named, no JSON": event("ping", "now"),
    "id": block("id: 1"),
    "retry": block("retry: 1000"),
    "empty data": block("data:"),
    "bare data": block("data"),
    "processing": comment("PROCESSING"),
}


@pytest.mark.parametrize("heartbeat", HEARTBEATS.values(), ids=HEARTBEATS.keys())
def test_a_heartbeat_is_bytes_and_no_progress(server, heartbeat):
    played = play(server, heartbeat, R, heartbeat, T("a"), heartbeat, T("b"), heartbeat, F, heartbeat, U, D)
    assert (played.end, played.text, played.result.chunks) == (("completed", ""), "ab", 5)
    endless = play(server, forever(silence(0.02), heartbeat), **IMPATIENT)
    assert (endless.end, endless.result.chunks) == (("idle_timeout", "keepalive"), 0)


def test_role_only_chunks_for_ever_are_no_content(server):
    played = play(server, forever(R, silence(0.02)), **IMPATIENT)
    assert (played.end, played.deltas) == (("idle_timeout", "empty_chunks"), [])
    assert played.retried


def test_a_reader_can_be_told_of_the_silence_before_the_abort(server):
    gate = Gate()
    server.next(sse(R, T("a"), at_gate(gate), T("b"), F, D))

    async def main():
        async with open_attempt(config_of(server), QUESTION) as running:
            assert (await anext(aiter(running))).text == "a"
            following = asyncio.ensure_future(anext(aiter(running)))
            while running.quiet_ms() < 50:  # noqa: ASYNC110 - polls the very thing that is tested
                await asyncio.sleep(0.005)
            gate.release()
            assert (await following).text == "b"
            assert running.quiet_ms() < 50

    run(then_close(main()))


def test_the_consumers_slowness_is_never_charged(server):
    played = play(
        server, R, *(T("x") for _ in range(4)), F, D, pause=0.45, stream_idle_timeout_ms=400, stream_lifetime_ms=1_200
    )
    assert (played.end, played.text) == (("completed", ""), "xxxx")


def test_a_blocked_loop_is_no_silence(server):
    async def main():
        for _ in range(2):
            gate = Gate()
            server.next(sse(R, T("a"), at_gate(gate), T("b"), F, D))
            async with open_attempt(config_of(server, stream_idle_timeout_ms=250), QUESTION) as running:
                deltas = aiter(running)
                assert (await anext(deltas)).text == "a"
                following = asyncio.ensure_future(anext(deltas))
                await asyncio.sleep(0.01)
                gate.release()
                time.sleep(0.5)  # noqa: ASYNC251 - the fault itself: something blocks the loop
                assert (await following).text == "b"
                assert [found async for found in deltas] == []
            assert running.result.end_state == "completed"

    run(then_close(main()))


# --- ends that are none, and ends that are -------------------------------------------------------------------------
def ends(state, kind, *steps, text="a", retried=False, **config):
    return steps, config, (state, kind), text, retried


NOT_OURS = data({"error": {"message": "no"}})
BAD_GATEWAY = data({"error": {"code": 502}})
HALF_EVENT = packets(b'data: {"choices": [{"del')
THROTTLED = finish("error_finish", content="Requests throttled")
PINGS = forever(silence(0.02), comment())
STILL = silence_forever()
ENDS = {
    "clean, no finish, no [DONE]": ends("truncated", "no_finish_reason", R, T("a")),
    "[DONE], no finish": ends("truncated", "no_finish_reason", R, T("a"), D),
    "[DONE], no finish, lenient": ends("completed", "", R, T("a"), D, lenient=True),
    "clean, lenient": ends("truncated", "no_finish_reason", R, T("a"), lenient=True),
    "[DONE], no finish, then silence": ends("truncated", "no_finish_reason", R, T("a"), D, STILL),
    "[DONE], no finish, then RST": ends("truncated", "no_finish_reason", R, T("a"), D, rst()),
    "lenient, [DONE], then silence": ends("completed", "", R, T("a"), D, STILL, lenient=True),
    "usage only": ends("truncated", "no_content", U, D, text="", retried=True),
    "nothing at all": ends("truncated", "no_chunks", comment(), text="", retried=True),
    "only [DONE]": ends("truncated", "no_chunks", D, text="", retried=True),
    "finish, then silence": ends("completed", "", R, T("a"), F, STILL),
    "finish, [DONE], then silence": ends("completed", "", R, T("a"), F, D, STILL),
    "finish, then pings": ends("completed", "", R, T("a"), F, PINGS),
    "finish, then RST": ends("completed", "", R, T("a"), F, rst()),
    "finish, then FIN": ends("completed", "", R, T("a"), F, fin()),
    "finish, then half an event": ends("completed", "", R, T("a"), F, HALF_EVENT),
    "length": ends("completed", "", R, T("a"), finish("length"), D),
    "empty answer": ends("completed", "", R, F, D, text=""),
    "half an event": ends("truncated", "incomplete_event", R, T("a"), HALF_EVENT),
    "text without its blank line": ends("truncated", "no_finish_reason", R, T("a"), unterminated(T("b")), text="ab"),
    "finish without its blank line": ends("completed", "", R, T("a"), unterminated(F)),
    "FIN": ends("transport_error", "disconnected", R, T("a"), fin()),
    "FIN inside a chunk": ends("transport_error", "disconnected", R, T("a"), fin_inside_chunk()),
    "RST": ends("transport_error", "connection_reset", R, T("a"), rst()),
    "FIN before any content": ends("transport_error", "disconnected", R, fin(), text="", retried=True),
    "RST before any content": ends("transport_error", "connection_reset", R, rst(), text="", retried=True),
    "malformed JSON": ends("protocol_error", "malformed_json", R, T("a"), data("{bad"), T("b"), STILL),
    "invalid UTF-8": ends("protocol_error", "invalid_utf8", R, T("a"), data(b"\xff"), STILL),
    "endless line": ends("protocol_error", "line_too_long", R, T("a"), endless_line()),
    "error frame": ends("provider_error", "error_frame", R, NOT_OURS, STILL, text=""),
    "transient error frame": ends("provider_error", "error_frame", R, BAD_GATEWAY, text="", retried=True),
    "transient, after text": ends("provider_error", "error_frame", R, T("a"), BAD_GATEWAY),
    "named error": ends("provider_error", "error_frame", R, event("error", {"message": "no"}), text=""),
    "error as finish": ends("provider_error", "error_frame", R, T("a"), THROTTLED),
}


@pytest.mark.parametrize(("steps", "config", "end", "text", "retried"), ENDS.values(), ids=ENDS.keys())
def test_every_end_has_its_name_and_keeps_the_text(server, steps, config, end, text, retried):
    played = play(server, *steps, **config)
    assert (played.end, played.text, played.retried) == (end, text, retried)
    assert (played.result.error is None) == (end[0] == "completed")
    assert server.wait_until_ended(server.chat_calls[-1].number, timeout=PROMPTLY_S)


@pytest.mark.parametrize("step", [data("{bad"), data({"error": {"message": "no"}}), endless_line()])
def test_a_stream_that_is_given_up_has_its_socket_closed(server, step):
    play(server, R, T("a"), step, silence_forever())
    assert ended_by(server) == "client_closed"


def test_an_error_frames_words_are_passed_on_and_its_content_is_no_answer(server):
    played = play(server, R, finish("error_finish", content="Requests throttled"))
    assert (played.deltas, played.result.delivered) == ([], False)
    assert "Requests throttled" in played.result.detail


def test_usage_and_finish_reasons_are_kept(server):
    played = play(server, R, T("a"), F, U, D)
    assert played.result.usage["total_tokens"] == 12
    assert played.result.finish_reasons == {0: "stop"}
    assert (played.result.chunks, played.result.error_code, played.result.detail) == (4, "", "")
    assert ended_by(server) == "replied"


def test_several_choices_end_when_each_has_its_finish(server):
    steps = [T("a", 0), T("b", 1), delta({}, "stop", 0), T("c", 1), delta({}, "length", 1), silence_forever()]
    played = play(server, *steps, request=QUESTION | {"n": 2})
    assert (played.end, played.result.finish_reasons) == (("completed", ""), {0: "stop", 1: "length"})
    assert [(found.index, found.text) for found in played.deltas] == [(0, "a"), (1, "b"), (1, "c")]
    half = play(server, *steps[:4], silence_forever(), request=QUESTION | {"n": 2}, **IMPATIENT)
    assert (half.end, half.retried) == (("idle_timeout", "silent"), False)


# --- framing, through the real client ------------------------------------------------------------------------------
DUCK = T("äö漢🦆")
FRAMINGS = {
    "CRLF": [framed(step) for step in (R, DUCK, F, D)],
    "CR": [framed(step, "\r") for step in (R, DUCK, F, D)],
    "CRLF, byte by byte": [bytewise(framed(step)) for step in (R, DUCK, F, D)],
    "LF, byte by byte": [bytewise(step) for step in (R, DUCK, F, D)],
    "BOM": [bom(), DUCK, F, D],
    "ids": [with_id("1", R), with_id("2", DUCK), comment(), block(""), with_id("3", F), D],
    "split character": [R, split(DUCK, len(DUCK.payload) - 40), F, D],
    "many events in one packet": [packets(R.payload + DUCK.payload + F.payload + U.payload + D.payload)],
    "an empty tool-call delta twice": [R, A(""), DUCK, A(""), F, D],
}


@pytest.mark.parametrize("steps", FRAMINGS.values(), ids=FRAMINGS.keys())
def test_the_text_is_the_same_however_it_is_framed(server, steps):
    played = play(server, *steps)
    assert (played.end, played.text, len(played.deltas)) == (("completed", ""), "äö漢🦆", 1)


def test_an_eight_megabyte_line_passes(server):
    played = play(server, R, T("x" * (8 * 1024 * 1024)), F, D)
    assert (played.end, len(played.text)) == (("completed", ""), 8 * 1024 * 1024)


# --- replies that are no streams -----------------------------------------------------------------------------------
def test_a_page_instead_of_a_stream_is_named_with_a_short_prefix(server):
    page = "<html>\n<title>Sign in</title> sk-secret " + "x" * 5_000
    played = play(server, status(200, page, content_type="text/html; charset=utf-8"), api_key="sk-secret")
    assert played.end == ("protocol_error", "not_an_event_stream")
    assert "text/html" in played.result.detail
    assert "<title>Sign in</title> ***" in played.result.detail
    assert len(played.result.detail) < 400
    assert not played.retried


def test_a_json_error_with_status_200_is_named(server):
    played = play(server, json_reply({"error": {"message": "overloaded"}}))
    assert played.end == ("protocol_error", "not_an_event_stream")
    assert "application/json" in played.result.detail
    assert "overloaded" in played.result.detail


def test_a_page_whose_body_hangs_is_named_at_once(server):
    server.next(then_hang(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 100\r\n\r\n"))
    played = run(then_close(attempt(config_of(server))))
    assert played.end == ("protocol_error", "not_an_event_stream")
    assert ended_by(server) == "client_closed"


STATUSES = [(400, False), (401, False), (404, False), (422, False), (429, True), (500, True), (503, True)]


@pytest.mark.parametrize(("code", "retried"), STATUSES)
def test_an_error_status_is_one_request_with_its_message_passed_on(server, code, retried):
    body = {"error": {"message": "too long for sk-secret", "type": "invalid_request_error", "code": "context_length"}}
    played = play(server, status(code, body, headers={"Retry-After": "7"}), api_key="sk-secret")
    assert (played.end, played.result.status, played.retried) == (("provider_error", "status"), code, retried)
    assert played.result.detail == f"the provider answered {code}: too long for ***"
    assert (played.result.error.provider_code, played.result.error.retry_after_ms) == ("context_length", 7_000)
    assert len(server.chat_calls) == 1


def test_an_endless_error_body_is_cut(server):
    server.next(status(500, "x" * 50_000_000, content_type="text/plain"))
    played = run(then_close(attempt(config_of(server))))
    assert played.result.status == 500
    assert len(played.result.detail) < 400
    assert len(played.result.error.detail) <= 300


def test_a_redirect_is_not_followed(server):
    played = play(server, status(307, "", headers={"Location": f"{server.address}/elsewhere"}))
    assert (played.end, played.result.status, played.retried) == (("provider_error", "status"), 307, False)
    assert [call.path for call in server.calls] == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("reply", "kind"), [(close_without_answer(), "disconnected"), (reset(), "connection_reset")], ids=["FIN", "RST"]
)
def test_a_connection_that_ends_without_an_answer(server, reply, kind):
    played = play(server, reply)
    assert (played.end, played.result.transport_code) == (("transport_error", kind), "ECONNRESET")
    assert played.retried


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_refused_connection(server, host):
    base_url = unused_address().replace("127.0.0.1", host) + "/v1"
    played = run(then_close(attempt(config_of(server, base_url=base_url))))
    assert (played.end, played.result.transport_code) == (("transport_error", "connection_refused"), "ECONNREFUSED")
    assert played.retried


@pytest.mark.parametrize("base_url", ["ftp://127.0.0.1/v1", "http://127.0.0.1:1/v1\n"])
def test_an_address_that_cannot_be_asked_is_not_tried_again(server, base_url):
    played = run(then_close(attempt(config_of(server, base_url=base_url, api_key="a\nb"))))
    assert played.result.end_state == "transport_error"
    assert not played.retried


# --- the user's cancel, and other ways to leave --------------------------------------------------------------------
@pytest.mark.parametrize(("cancelled", "end"), [(True, ("cancelled", "user")), (False, ("interrupted", "cancelled"))])
@pytest.mark.parametrize("steps", [(R, T("a"), silence_forever()), ()], ids=["mid-stream", "before the headers"])
def test_a_cancelled_task_frees_the_socket_within_a_second(server, cancelled, end, steps):
    server.next(sse(*steps) if steps else hang())

    async def main():
        running = open_attempt(config_of(server, stream_idle_timeout_ms=0), QUESTION, is_cancelled=lambda: cancelled)
        seen = asyncio.Event()

        async def read():
            async with running:
                async for _ in running:
                    seen.set()

        task = asyncio.create_task(read())
        await (seen.wait() if steps else asyncio.to_thread(server.wait_for_calls, 1))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert (running.result.end_state, running.result.error_kind) == end
        assert running.result.classification.kind == RetryKind.ABORT
        assert await asyncio.to_thread(ended_by, server) == "client_closed"

    run(then_close(main()))


def test_a_cancel_that_has_happened_wins_over_the_timeout(server):
    server.next(sse(R, T("a"), silence_forever()))
    played = run(then_close(attempt(config_of(server, **IMPATIENT), is_cancelled=lambda: True)))
    assert (played.end, played.text) == (("cancelled", "user"), "a")
    assert not played.retried


class Full(Exception):
    """The consumer's own reason to leave."""


@pytest.mark.parametrize("leave", ["break", "raise"])
def test_leaving_early_frees_the_socket(server, leave):
    server.next(sse(R, forever(T("x"), silence(0.005))))

    async def main():
        running = open_attempt(config_of(server), QUESTION)
        with contextlib.suppress(Full):
            async with running:
                async for _ in running:
                    if leave == "raise":
                        raise Full
                    break
        assert await asyncio.to_thread(ended_by, server) == "client_closed"
        assert (running.result.end_state, running.result.error_kind) == ("interrupted", "cancelled")

    run(then_close(main()))


def test_leaving_without_the_block_holds_the_socket(server):
    """The twin: the loop is left, and nothing closes what it read."""
    server.next(sse(R, T("a"), silence_forever()))

    async def main():
        running = open_attempt(config_of(server), QUESTION)
        async for _ in running:
            break
        await asyncio.sleep(0.3)
        assert server.chat_calls[-1].is_open
        await running.__aexit__(None, None, None)
        assert await asyncio.to_thread(ended_by, server) == "client_closed"

    run(then_close(main()))


def test_an_attempt_that_was_never_read_sends_nothing(server):
    async def main():
        async with open_attempt(config_of(server), QUESTION) as running:
            pass
        with pytest.raises(RuntimeError):
            _ = running.result

    run(then_close(main()))
    assert server.calls == []


# --- the request, and the client that sends it ---------------------------------------------------------------------
def test_the_request_passes_through_and_is_always_streamed(server):
    request = QUESTION | {
        "model": "theirs",
        "stream": False,
        "stream_options": {"include_obfuscation": False},
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {}}}],
        "temperature": 0.25,
        "n": 1,
        "logprobs": True,
        "response_format": {"type": "json_object"},
        "odd_parameter": {"of": ["a", "server"]},
    }
    play(server, R, T("a"), F, D, request=request)
    asked = {"model": "m", "stream": True, "stream_options": {"include_obfuscation": False, "include_usage": True}}
    assert server.chat_calls[0].body == request | asked


@pytest.mark.parametrize(("api_key", "sent"), [(None, "Bearer not-needed"), ("sk-ours", "Bearer sk-ours")])
def test_the_environments_key_organization_and_proxy_are_sent_to_nobody(server, monkeypatch, api_key, sent):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "of-the-environment")
    monkeypatch.setenv("HTTP_PROXY", unused_address())
    monkeypatch.setenv("http_proxy", unused_address())
    played = play(server, R, T("a"), F, D, api_key=api_key)
    assert played.end == ("completed", "")
    headers = server.chat_calls[0].headers
    assert headers["authorization"] == sent
    assert "of-the-environment" not in headers.values()


def test_log_probabilities_and_ids_survive(server):
    logprobs = {"content": [{"token": "a", "logprob": -0.1}]}
    chunk = {"id": "c1", "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": logprobs}]}
    played = play(server, data(chunk), F, D)
    assert played.deltas[0].choice_fields == {"logprobs": logprobs}


def test_one_client_and_one_connection_serve_one_provider(server):
    async def main():
        for _ in range(3):
            assert (await attempt(config_of(server))).end == ("completed", "")
        assert server.connections_accepted == 1
        assert (await attempt(config_of(server, api_key="sk-new"))).end == ("completed", "")
        assert server.connections_accepted == 2

    run(then_close(main()))
    assert server.chat_calls[-1].headers["authorization"] == "Bearer sk-new"


def test_a_replaced_client_serves_its_attempts_to_their_end(server):
    gate = Gate()
    server.next(sse(R, T("a"), at_gate(gate), T("b"), F, D))

    async def main():
        first = asyncio.create_task(attempt(config_of(server)))
        await asyncio.to_thread(gate.wait_arrived)
        assert (await attempt(config_of(server, api_key="sk-new"))).end == ("completed", "")
        gate.release()
        assert (await first).text == "ab"

    run(then_close(main()))


def test_attempts_on_several_loops_in_a_row_do_not_meet(server):
    for _ in range(3):
        assert run(then_close(attempt(config_of(server)))).end == ("completed", "")


def test_sixteen_attempts_at_once(server):
    async def main():
        played = await asyncio.gather(*(attempt(config_of(server)) for _ in range(16)))
        assert {each.end for each in played} == {("completed", "")}

    run(then_close(main()))


def test_the_effective_budgets_are_logged_and_no_content_and_no_key_is(server, caplog):
    caplog.set_level(logging.DEBUG, logger="streaming")
    play(server, R, T("the answer"), F, D, api_key="sk-secret", stream_keepalive_timeout_ms=0)
    said = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("streaming"))
    assert "stream_idle_timeout_ms=10000 stream_keepalive_timeout_ms=off" in said
    assert "state=completed" in said
    for secret in ("sk-secret", "the answer", "What holds?"):
        assert secret not in said
