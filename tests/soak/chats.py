"""Chat turns beside the sweeps: clients that read on and clients that hang up, and what each of them was given."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from uuid import UUID

import httpx2

from streaming.models import ChatTurn
from streaming.states import TurnState
from tests.support.provider_server import Call
from tests.support.provider_server.chat_stream import D, F, R, T, silence, sse
from tests.support.provider_server.exchange import Reply

WORDS = 12
# A client gives up a silent connection after this; the product answers long before.
CLIENT_TIMEOUT_S = 60.0


@dataclass
class Asked:
    """One turn as its client saw it: its id, the text that came, and whether the answer came to its end."""

    question: str
    turn: str = ""
    delivered: str = ""
    has_ended: bool = False
    hung_up: bool = False


@dataclass
class Chats:
    """The clients of one web process. Each question is asked once."""

    address: str
    key: str
    asked: list[Asked] = field(default_factory=list)

    def ask_for(self, seconds: float, pick: float) -> None:
        """Asks one question after the other; about half of the clients hang up after some words."""
        rng = random.Random(pick)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            words = rng.randrange(WORDS) if rng.random() < 0.5 else None
            asked = Asked(f"question {pick:.6f} {len(self.asked)}")
            self.asked.append(asked)
            try:
                self._ask(asked, words)
            except httpx2.HTTPError:
                # The web process may have been without its database or its event log: it answered with an error, or late.
                asked.hung_up = True

    def _ask(self, asked: Asked, hang_up_after: int | None) -> None:
        body = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": asked.question}]}
        headers = {"Authorization": f"Bearer {self.key}"}
        with (
            httpx2.Client(base_url=self.address, headers=headers, trust_env=False, timeout=CLIENT_TIMEOUT_S) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            for number, chunk in enumerate(_chunks(reply)):
                asked.turn = str(UUID(chunk["id"].removeprefix("chatcmpl-"))) if "id" in chunk else asked.turn
                for choice in chunk.get("choices", ()):
                    asked.delivered += choice["delta"].get("content") or ""
                    asked.has_ended |= bool(choice.get("finish_reason"))
                if number == hang_up_after:
                    asked.hung_up = True
                    return


def _chunks(reply: httpx2.Response) -> Iterator[dict]:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def answer(call: Call) -> Reply | None:
    """Words that name their call, so that a text from two calls shows."""
    if call.kind != "chat":
        return None
    words = [step for number in range(WORDS) for step in (T(f"{call.number}.{number} "), silence(0.02))]
    return sse(R, *words, F, D)


def violations(asked: list[Asked], *, log_was_lost: bool) -> Iterator[str]:
    """Every turn is decided, its stored text is what its client was given, and nothing was asked again after a delivery.

    `log_was_lost`: the event log was away or lost; a turn whose worker was lost with it ends without its text.
    """
    turns = {str(turn.public_id): turn for turn in ChatTurn.objects.prefetch_related("attempts")}
    for turn in turns.values():
        if not turn.has_ended:
            yield f"turn {turn.public_id} is {turn.state}"
        yield from _of_one_call(turn)
    for one in asked:
        turn = turns.get(one.turn)
        if turn is None:
            if one.delivered:
                yield f"{one.question!r} was answered by no stored turn: {one.delivered!r}"
            continue
        if not turn.answer.startswith(one.delivered) and not log_was_lost:
            yield f"turn {turn.public_id} delivered {one.delivered!r} and stored {turn.answer!r} ({turn.error_code})"
        if one.has_ended and (turn.state, turn.answer) != (TurnState.COMPLETED, one.delivered):
            yield f"turn {turn.public_id} ended with {one.delivered!r} for its client: {turn.state}, {turn.answer!r}"


def _of_one_call(turn: ChatTurn) -> Iterator[str]:
    calls = {word.split(".")[0] for word in turn.answer.split()}
    if len(calls) > 1:
        yield f"turn {turn.public_id} has the text of calls {sorted(calls)}: {turn.answer!r}"
    *before, _ = turn.attempts.all() or [None]
    for attempt in before:
        if attempt.first_content_at is not None:
            yield f"turn {turn.public_id}: attempt {attempt.number} delivered, and another followed"
