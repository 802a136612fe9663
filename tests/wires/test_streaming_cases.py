"""Chat streams as real servers send them, through the whole path: worker, log, web, and a reader of the turn.

Each case is what goes over the wire, attempt by attempt, and what must come of it. What concerns a blocked loop, a slow
consumer and a clean-up that hangs is tried at the watchdog and the pipeline; the deaths of processes in
`test_turn_processes`.
"""

from dataclasses import dataclass, field

import pytest

from tests.conftest import REPOSITORY_ROOT
from tests.support.chat_stack import text_of
from tests.support.provider_server import Reply, hang, json_reply, status
from tests.support.provider_server.chat_stream import (
    A,
    D,
    F,
    R,
    T,
    U,
    Z,
    block,
    bom,
    bytewise,
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
    packets,
    repeat,
    rst,
    silence,
    silence_forever,
    sse,
    unterminated,
    with_id,
)
from tests.support.waiting import PROMPTLY_S, eventually

QUIET = silence_forever()
# For wires that take their time byte by byte.
UNHURRIED = {"stream_idle_timeout_ms": 5_000, "stream_lifetime_ms": 10_000}
WHOLE = sse(R, T("Hello"), T(" world"), F, U, D)


@dataclass
class Case:
    """`wires` are the replies to the attempts, the last one for all that follow."""

    name: str
    wires: list[Reply]
    state: str = "completed"
    kind: str = ""
    calls: int = 1
    text: str | None = "Hello world"
    provider: dict[str, object] = field(default_factory=dict)

    def __post_init__(self):
        self.wires = self.wires if isinstance(self.wires, list) else [self.wires]


def steady(step, gap=0.03):
    return sse(R, forever(silence(gap), step))


CASES = [
    Case("1 headers, then nothing", sse(QUIET), "idle_timeout", "silent", 3, ""),
    Case("2 nothing at all", hang(), "transport_error", "headers_timeout", 3, ""),
    Case("3 a role proves nothing: replayed", [sse(R, QUIET), WHOLE], calls=2),
    Case(
        "5 silence while arguments are buffered upstream",
        sse(R, T("x"), T("y"), A("", id="c", name="f"), QUIET),
        "idle_timeout",
        "silent",
        1,
        "xy",
    ),
    Case(
        "6 many argument deltas, each in time",
        sse(R, A("", id="c", name="f"), repeat(40, silence(0.02), A("1")), finish("tool_calls"), D),
        text="",
        provider={"stream_idle_timeout_ms": 300},
    ),
    Case("8 reasoning for ever", steady(Z("hm")), "lifetime_exceeded", "attempt", 1, ""),
    Case("9 text just in time for ever", steady(T("x")), "lifetime_exceeded", "attempt", 1, None),
    Case("empty chunks for ever", steady(T("")), "idle_timeout", "empty_chunks", 3, ""),
    Case(
        "11 comments after text",
        sse(R, T("Hello"), forever(silence(0.03), comment())),
        "idle_timeout",
        "keepalive",
        1,
        "Hello",
    ),
    Case(
        "13 27 29 30 heartbeats of every kind",
        sse(
            comment("PROCESSING"),
            R,
            event("ping", "{}"),
            with_id("1", T("Hello")),
            comment(),
            block("id: 2"),
            block("retry: 1000"),
            block("data:"),
            block("data: "),
            T(" world"),
            F,
            U,
            D,
        ),
    ),
    Case("a refusal", status(400), "provider_error", "status", 1, ""),
    Case("busy, and again, and again", status(503), "provider_error", "status", 3, ""),
    Case("19 no finish, no end", sse(R, T("Hello")), "truncated", "no_finish_reason", 1, "Hello"),
    Case("21 an end without a finish", sse(R, T("Hello"), D), "truncated", "no_finish_reason", 1, "Hello"),
    Case(
        "21 the same from a lenient provider",
        sse(R, T("Hello"), D),
        text="Hello",
        provider={"accepts_missing_finish": True},
    ),
    Case("22 usage alone: asked again", [sse(U, D), WHOLE], calls=2),
    Case("22 usage alone, every time", sse(U, D), "truncated", "no_content", 3, ""),
    Case("23 finished, ended, and the socket open", sse(R, T("Hello world"), F, D, QUIET)),
    Case(
        "31 an error frame",
        sse(R, data({"error": {"message": "no", "code": "bad"}})),
        "provider_error",
        "error_frame",
        1,
        "",
    ),
    Case(
        "31 a transient one before any text",
        [sse(R, data({"error": {"message": "busy", "code": 503}})), WHOLE],
        calls=2,
    ),
    Case(
        "31 a transient one after text",
        [sse(R, T("Hello"), data({"error": {"message": "busy", "code": 503}})), WHOLE],
        "provider_error",
        "error_frame",
        1,
        "Hello",
    ),
    Case("32 event: error", sse(R, event("error", {"message": "no"})), "provider_error", "error_frame", 1, ""),
    Case(
        "33 a failure dressed as a finish",
        sse(R, delta({"content": "out of memory"}, "error_finish"), D),
        "provider_error",
        "error_frame",
        1,
        "",
    ),
    Case("35 empty arguments", sse(R, A("", id="c", name="f"), A(""), A(""), T("Hello world"), F, D)),
    Case(
        "36 malformed JSON",
        sse(R, T("Hello"), data("{nonsense"), QUIET),
        "protocol_error",
        "malformed_json",
        1,
        "Hello",
    ),
    Case("38 a page", status(200, "<html>", content_type="text/html"), "protocol_error", "not_an_event_stream", 1, ""),
    Case(
        "38 an error body with a 200",
        json_reply({"error": {"message": "no"}}),
        "protocol_error",
        "not_an_event_stream",
        1,
        "",
    ),
    Case("40 CRLF", sse(*(framed(step) for step in (R, T("Hello"), T(" world"), F, U, D)))),
    Case(
        "40 CR, byte by byte",
        sse(*(bytewise(framed(step, "\r")) for step in (R, T("Hello world"), F, D))),
        provider=UNHURRIED,
    ),
    Case("40 a byte order mark", sse(bom(), R, T("Hello world"), F, D)),
    Case(
        "41 characters split between packets",
        sse(R, bytewise(T("Grüße, 世界 😀")), F, D),
        text="Grüße, 世界 😀",
        provider=UNHURRIED,
    ),
    Case(
        "41 invalid UTF-8",
        sse(R, T("Hello"), packets(b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n'), QUIET),
        "protocol_error",
        "invalid_utf8",
        1,
        "Hello",
    ),
    Case(
        "42 a line of 8 MB",
        sse(R, delta({"content": "Hello world"}), data({"choices": [], "pad": "x" * 8_000_000}), F, D),
    ),
    Case("42 a line without an end", sse(R, T("Hello"), endless_line()), "protocol_error", "line_too_long", 1, "Hello"),
    Case("43 the last event without its blank line", sse(R, T("Hello world"), unterminated(F))),
    Case("46 a FIN", sse(R, T("Hello"), fin()), "transport_error", "disconnected", 1, "Hello"),
    Case(
        "46 a FIN inside a chunk", sse(R, T("Hello"), fin_inside_chunk()), "transport_error", "disconnected", 1, "Hello"
    ),
    Case("46 a reset before any text", [sse(R, rst()), WHOLE], calls=2),
    Case(
        "51 text, then silence: never replayed",
        [sse(R, T("Hello wo"), QUIET), WHOLE],
        "idle_timeout",
        "silent",
        1,
        "Hello wo",
    ),
    Case("52 silence, then the whole answer", [sse(R, QUIET), WHOLE], calls=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(chat, case):
    budgets = {"stream_idle_timeout_ms": 400, "request_timeout_ms": 400, "stream_lifetime_ms": 1_500}
    type(chat.provider).objects.filter(pk=chat.provider.pk).update(**budgets | case.provider)
    chat.server.next(*case.wires[:-1])
    chat.server.next(*[case.wires[-1]] * 4)
    identifier = chat.take()["id"]
    events = chat.events(identifier)
    end = events[-1]
    assert (end["state"], end["error_kind"]) == (case.state, case.kind)
    assert text_of(events) == case.text or case.text is None
    turn = chat.turn(identifier)
    assert (turn.state, turn.error_kind, turn.answer) == (case.state, case.kind, text_of(events))
    assert [attempt.number for attempt in turn.attempts.all()] == list(range(1, case.calls + 1))
    assert len(chat.server.chat_calls) == case.calls
    # One start, whatever was tried; every delta of the one attempt that was delivered.
    assert [event["event"] for event in events].count("start") == 1
    assert {event["attempt"] for event in events if event["event"] == "delta"} <= {case.calls}
    eventually(lambda: not any(call.is_open for call in chat.server.chat_calls), timeout=PROMPTLY_S)


def documented():
    """The cases as a table in Markdown: docs/streaming_cases.md."""
    lines = ["| wire | end state | kind | attempts | text kept |", "|---|---|---|---|---|"]
    for case in CASES:
        text = (
            "as far as it came" if case.text is None else "the whole answer" if case.state == "completed" else case.text
        )
        shown = text if len(text) < 40 else f"{len(text):,} characters"
        lines.append(f"| {' | '.join([case.name, case.state, case.kind or '-', str(case.calls), shown or '-'])} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_cases_is_the_documents():
    assert documented() in (REPOSITORY_ROOT / "docs" / "streaming_cases.md").read_text()


def test_25_usage_is_recorded(chat):
    identifier = chat.take()["id"]
    assert chat.events(identifier)[-1]["state"] == "completed"
    assert chat.turn(identifier).usage["total_tokens"] == 12


def test_50_the_one_owner_of_time_is_logged_when_a_call_starts(chat):
    identifier = chat.take()["id"]
    chat.wait_ended(identifier)
    starts = [line for line in chat.stack.worker.output.splitlines() if f"turn={identifier} attempt=1 starts" in line]
    assert len(starts) == 1
    assert "stream_idle_timeout_ms=600" in starts[0]
