"""One row for each way of an embedding server: what it does, what becomes of the repository, and at how many calls.

The numbers are those of what servers and repositories were seen to do. `documented` is the table of docs/embedding_cases.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from embeddings import codes
from embeddings.states import ProviderKind
from tests.support.provider_server import (
    Call,
    Reply,
    as_strings,
    close_without_answer,
    default,
    drip,
    dropped,
    hang,
    hang_after_headers,
    indexed,
    json_reply,
    reordered,
    reset,
    status,
    truncate,
    vectors,
    with_number,
    without_index,
    wrong_dimensions,
)
from tests.support.sweeps import DIMENSIONS, GEMINI, KEY, KINDS, LOCAL_KINDS, OLLAMA, OPENAI

POISON = "poison"
SHORT = {"embedding_timeout_ms": 1000}
TIMED_OUT = codes.PROVIDER_TIMED_OUT
FAILED = codes.PROVIDER_FAILED
TIMEOUT_CODE = {
    OPENAI: "OPENAI_COMPATIBLE_REQUEST_TIMEOUT",
    OLLAMA: "PROVIDER_TIMEOUT",
    GEMINI: "PROVIDER_TIMEOUT",
}

Plan = Callable[[Call], Reply | None]
# Made anew for each test: a plan may count.
MakePlan = Callable[[], Plan]


def always(reply: Reply) -> MakePlan:
    return lambda: lambda call: reply


def poisoned(reply: Reply) -> MakePlan:
    """`reply` to every call that carries the poison."""
    return lambda: lambda call: reply if _place_of_poison(call) is not None else None


def altered(change: Callable[[int], Any]) -> MakePlan:
    """An embedding reply altered at the place of the poison, if the call carries it."""

    def plan(call: Call) -> Reply | None:
        at = _place_of_poison(call)
        return None if at is None else vectors(change(at))

    return lambda: plan


def in_turn(*replies: Reply) -> MakePlan:
    """These replies to the first calls, the default ever after."""

    def make() -> Plan:
        left = list(replies)
        return lambda call: left.pop(0) if left else None

    return make


def at_most(limit: int, refusal: Reply) -> MakePlan:
    return lambda: lambda call: refusal if len(call.texts) > limit else None


def _place_of_poison(call: Call) -> int | None:
    return next((at for at, text in enumerate(call.texts) if POISON in text), None)


NOT_JSON = status(200, b"<html>proxy</html>")


@dataclass(frozen=True)
class Case:
    """One behaviour of a server, tried on `rows` files of one row each, of which `poison` contain a text it refuses."""

    number: str
    plan: MakePlan
    ends: tuple[str, str, str | None]
    calls: int | dict[ProviderKind, int]
    kinds: tuple[ProviderKind, ...] = KINDS
    rows: int = 8
    poison: int = 0
    lands: int | None = None
    undeliverable: int = 0
    detail: str = ""
    provider: dict[str, Any] = field(default_factory=dict)


SUCCEEDED = ("succeeded", "", "")


def failed(source: str) -> tuple[str, str, str]:
    return ("failed", FAILED, source)


# Whole, a half, the control; once more without the encoding that this server has never taken yet.
CONTROLLED = {OPENAI: 4, OLLAMA: 3, GEMINI: 3}
TIMES_OUT = ("deferred", TIMED_OUT, None)

CASES = [
    Case("plain", always(default()), SUCCEEDED, 1),
    # One text refused: bisected, at most twelve calls for a batch of thirty-two.
    Case("3 a refused text", poisoned(status(400)), SUCCEEDED, 8, poison=1, undeliverable=1, detail="400"),
    Case("3 a refused text among thirty-two", poisoned(status(400)), SUCCEEDED, 12, rows=32, poison=1, undeliverable=1),
    Case("3 as 413", poisoned(status(413)), SUCCEEDED, 8, poison=1, undeliverable=1),
    Case("3 as 422", poisoned(status(422)), SUCCEEDED, 8, poison=1, undeliverable=1),
    Case(
        "26 an oversized text",
        poisoned(status(500, {"error": {"code": 500, "message": "input (513 tokens) is too large to process."}})),
        SUCCEEDED,
        8,
        poison=1,
        undeliverable=1,
        detail="too large to process",
        kinds=(OPENAI,),
    ),
    Case(
        "26 an oversized text, in Ollama's wording",
        poisoned(status(400, {"error": "the input length exceeds the context length"})),
        SUCCEEDED,
        8,
        poison=1,
        undeliverable=1,
        detail="the input length exceeds",
        kinds=(OLLAMA,),
    ),
    Case("24a NaN in a vector", altered(lambda at: with_number(math.nan, at)), SUCCEEDED, 8, poison=1, undeliverable=1),
    Case("24a infinity in a vector", altered(lambda at: with_number(math.inf, at)), SUCCEEDED, 8, poison=1, undeliverable=1),
    Case("24a null in a vector", altered(lambda at: with_number(None, at)), SUCCEEDED, 8, poison=1, undeliverable=1),
    Case("3 every text refused, not the control", poisoned(status(400)), ("failed", codes.ALL_UNDELIVERABLE, ""), 8,
         rows=4, poison=4, undeliverable=4, lands=0),
    # Every batch refused: never shown as complete, and no row is marked undeliverable.
    Case("14 every batch refused", always(status(400)), failed("PROVIDER_TEXT_REFUSED"), CONTROLLED, lands=0, detail="400"),
    Case("9 every batch an error", always(status(500)), failed("PROVIDER_SERVER_FAILED"), CONTROLLED, lands=0, detail="500"),
    Case("9 a gateway error", always(status(502)), failed("PROVIDER_STATUS"), 1, lands=0, detail="502"),
    Case("9 a redirect", always(status(307, headers={"Location": "http://127.0.0.1:9/"})), failed("PROVIDER_STATUS"), 1,
         lands=0, detail="307"),
    Case("10 a limit of ten texts a call",
         at_most(10, status(400, {"error": {"message": "batch size 16 is over 10"}})), SUCCEEDED, 8,
         rows=32),
    Case("12 busy, Retry-After in seconds", in_turn(default(), status(429, headers={"Retry-After": "1"})), SUCCEEDED, 5,
         provider={"batch_size": 2}),
    Case("12 busy, no Retry-After", in_turn(status(503)), SUCCEEDED, 2),
    Case("13 unauthorized", always(status(401)), failed("PROVIDER_UNAUTHORIZED"), 1, lands=0, detail=KEY,
         provider={"api_key_env": KEY}),
    Case("13 forbidden", always(status(403)), failed("PROVIDER_UNAUTHORIZED"), 1, lands=0, detail="--api-key-env",
         kinds=LOCAL_KINDS),
    Case(
        "13 a wrong key, in Google's wording",
        always(status(400, {"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT",
                                      "details": [{"reason": "API_KEY_INVALID"}]}})),
        failed("PROVIDER_UNAUTHORIZED"), 1, kinds=(GEMINI,), lands=0, detail=KEY,
    ),
    # Silence, in every shape, is a provider timeout.
    Case("9 no reply", always(hang()), TIMES_OUT, 1, lands=0, provider=SHORT),
    Case("9 headers, then silence", always(hang_after_headers()), TIMES_OUT, 1, lands=0, provider=SHORT),
    Case("18 a body that trickles in", always(drip(vectors(), interval=0.2)), TIMES_OUT, 1, lands=0, provider=SHORT),
    # A reply that fails a check stores nothing, and no text is blamed for it.
    Case("19 one vector too few", always(vectors(dropped(1))), failed("PROVIDER_REPLY_REFUSED"), 1, lands=0,
         detail="8 texts were sent and 7 vectors came back"),
    Case("19 one vector too many", always(vectors(lambda items: [*items, items[0]])), failed("PROVIDER_REPLY_REFUSED"), 1,
         lands=0, detail="9 vectors"),
    Case("20 vectors in another order", always(vectors(reordered([2, 0, 1, 3, 7, 6, 5, 4]))), SUCCEEDED, 1, kinds=(OPENAI,)),
    Case("20 vectors without indices", always(vectors(without_index)), SUCCEEDED, 1),
    Case("20 duplicate indices", always(vectors(indexed(0, 0, 1, 2, 3, 4, 5, 6))), failed("PROVIDER_REPLY_REFUSED"), 1, lands=0,
         kinds=(OPENAI,), detail="indices"),
    Case("20 indices out of range", always(vectors(indexed(*range(1, 9)))), failed("PROVIDER_REPLY_REFUSED"), 1, lands=0,
         kinds=(OPENAI,), detail="indices"),
    Case("20 indices that are not integers",
         always(vectors(indexed(*"01234567"))), failed("PROVIDER_REPLY_REFUSED"), 1, lands=0,
         kinds=(OPENAI,), detail="indices"),
    Case("22 dimensions that change during a run", in_turn(default(), wrong_dimensions(DIMENSIONS * 2)),
         failed("PROVIDER_DIMENSION_MISMATCH"), 2, lands=4, provider={"batch_size": 4},
         detail="16 dimensions, this generation has 8"),
    Case("22 dimensions that differ within a reply",
         always(vectors(lambda items: [{**items[0], "embedding": [1.0]}, *items[1:]])),
         failed("PROVIDER_REPLY_REFUSED"), 1, lands=0, detail="[1, 8] dimensions"),
    Case("25 floats although base64 was requested", always(vectors(encoding="float")), SUCCEEDED, 1, kinds=(OPENAI,)),
    Case("25 numbers as strings", always(vectors(as_strings)), SUCCEEDED, 1),
    Case("25 an empty list", always(vectors(lambda items: [])), failed("PROVIDER_REPLY_REFUSED"), 1, lands=0),
    Case("25 null instead of a list", always(json_reply({"data": None, "embeddings": None})),
         failed("PROVIDER_REPLY_REFUSED"), 1, lands=0),
    Case("25 an unrelated object", always(json_reply({"ok": True})), failed("PROVIDER_REPLY_REFUSED"), 1, lands=0),
    Case("25 a body that is not JSON", always(NOT_JSON), failed("PROVIDER_REPLY_REFUSED"), 1, lands=0, detail="proxy"),
    # A connection that fails has a code of its own.
    Case("27 a reset connection", always(reset()), failed("PROVIDER_UNREACHABLE"), 1, lands=0),
    Case("27 a connection closed without a reply", always(close_without_answer()), failed("PROVIDER_UNREACHABLE"), 1, lands=0),
    Case("27 a reply cut in the middle", always(truncate(vectors(), 120)), failed("PROVIDER_UNREACHABLE"), 1, lands=0),
    # A model that is not loaded is retried within the task.
    Case("35 model loading", in_turn(status(503, {"error": {"message": "Loading model", "code": 503}})), SUCCEEDED, 2,
         kinds=(OPENAI,)),
    Case("35 model unloaded", in_turn(status(400, {"error": {"message": "Model was unloaded while queued"}})), SUCCEEDED, 2,
         kinds=(OPENAI,)),
    Case("35 model load cancelled",
         in_turn(status(400, {"error": {"message": "Failed to load model: Operation canceled"}})), SUCCEEDED, 2,
         kinds=(OPENAI,)),
    Case("35 runner terminated",
         in_turn(status(500, {"error": "llama runner process has terminated: exit status 2"})), SUCCEEDED, 2,
         kinds=(OLLAMA,)),
    Case("35 model not found at first", in_turn(status(404)), SUCCEEDED, 2, kinds=LOCAL_KINDS),
    Case("35 model never loaded", always(status(404)), failed("PROVIDER_MODEL_NOT_LOADED"), 4, lands=0, kinds=LOCAL_KINDS),
    Case("35 no such model", always(status(404)), failed("PROVIDER_STATUS"), 1, lands=0, kinds=(GEMINI,)),
]  # fmt: skip


def calls_of(case: Case, kind: ProviderKind) -> int:
    """How many calls the server counts."""
    return case.calls if isinstance(case.calls, int) else case.calls[kind]


def ends_of(case: Case, kind: ProviderKind) -> tuple[str, str, str]:
    """The outcome's status, code and source code."""
    status_, code, source = case.ends
    return status_, code, TIMEOUT_CODE[kind] if source is None else source


def lands_of(case: Case) -> int:
    """How many rows have a vector in the end."""
    return case.rows - case.poison if case.lands is None else case.lands


def documented() -> str:
    """The cases as a table in Markdown."""
    lines = [
        "| case | kinds | rows | outcome | source code | stored | undeliverable | calls |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        kinds = "all" if case.kinds == KINDS else ", ".join(case.kinds)
        codes_ = sorted({ends_of(case, kind)[2] for kind in case.kinds})
        calls = sorted({calls_of(case, kind) for kind in case.kinds})
        cells = [
            case.number,
            kinds,
            str(case.rows),
            " ".join(filter(None, case.ends[:2])),
            " or ".join(filter(None, codes_)) or "-",
            str(lands_of(case)),
            str(case.undeliverable),
            " or ".join(map(str, calls)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
