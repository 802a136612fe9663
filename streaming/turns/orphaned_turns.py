"""Turns that nobody works on any more: a lost lease, or no worker at all. Any reader, or beat, ends them.

The text of a lost turn is rebuilt from its log. The log is fenced before it is read, so that a worker that still lives
somewhere appends nothing after what was kept (docs/architecture.md, Chat).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import cast

import redis
from django.conf import settings
from django.db.models.functions import Now
from django.utils import timezone
from kombu.exceptions import OperationalError
from redis.exceptions import ResponseError

from embeddings.runtime import workers
from streaming import codes
from streaming.log import events
from streaming.log.answer import Answer
from streaming.log.events import Event
from streaming.log.valkey import UNREACHABLE, connect
from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TurnOrigin, TurnState
from streaming.turns import transitions
from streaming.turns.transitions import Ending, Result, end_data

logger = logging.getLogger(__name__)

# Entries as the client gives them: the id of each, and its fields.
_Entries = list[tuple[bytes, dict[bytes, bytes]]]

WORKER_LOST = Ending(TurnState.INTERRUPTED, codes.WORKER_LOST, "worker_lost", detail="The worker that ran it is gone.")
NO_WORKER = Ending(
    TurnState.INTERRUPTED,
    codes.NO_WORKER,
    "no_worker",
    detail=f"No worker takes chat turns: start one with `{workers.START['chat']}`.",
)
# A log that is away this long after the lease ran out is not waited for: the turn ends without its text.
LOG_PATIENCE = timedelta(seconds=60)
# Whether workers are there is unknown while the broker is away; a turn is not left to wait for ever.
BROKER_PATIENCE = timedelta(seconds=30)
# Asked twice before the answer is no: a busy machine may be late once.
_ASK_S = (1.0, 3.0)
_ANSWER_HOLDS_S = 3.0


def end_lost(turn: ChatTurn) -> bool:
    """Ends a running turn whose lease has run out, with the text of its log; whether this call ended it."""
    if not transitions.is_lost(turn):
        return False
    try:
        with connect() as client:
            client.ping()
            return _end_with_log(turn, client)
    except UNREACHABLE as error:
        logger.warning("turn=%s: its log cannot be read: %s", turn.public_id, type(error).__name__)
        expires = turn.lease_expires_at
        if expires is None or timezone.now() - expires < LOG_PATIENCE:
            return False
        claim = transitions.take_over_lost(turn)
        return claim is not None and transitions.end(claim, WORKER_LOST, Result())


def end_unclaimed(turn: ChatTurn) -> bool:
    """Ends a turn that has stood queued for long if no worker takes any, else rings again; whether it ended it."""
    waited = timezone.now() - turn.created_at
    if turn.state != TurnState.QUEUED or waited < timedelta(milliseconds=settings.CHAT_CLAIM_WAIT_MS):
        return False
    there = worker_is_there()
    if there is None and waited < BROKER_PATIENCE:
        return False
    if there:
        transitions.ring_again(turn)
        return False
    ended = transitions.end_unclaimed(turn, NO_WORKER)
    if ended:
        append_end(turn, NO_WORKER)
    return ended


def unfinished_worth_a_look() -> Iterable[ChatTurn]:
    """Lost turns, and those that have stood queued for long."""
    now = timezone.now()
    long_queued = now - timedelta(milliseconds=settings.CHAT_CLAIM_WAIT_MS)
    lost = ChatTurn.objects.filter(state=TurnState.RUNNING, lease_expires_at__lt=now)
    return [*lost, *ChatTurn.objects.filter(state=TurnState.QUEUED, created_at__lt=long_queued)]


def append_end(turn: ChatTurn, ending: Ending) -> None:
    """Tells readers at once; one who is not told finds the end in the database a second later."""
    try:
        with connect() as client:
            _append_end(client, turn, ending, attempt=0)
    except UNREACHABLE as error:
        logger.warning("turn=%s: its end could not be logged: %s", turn.public_id, type(error).__name__)


def _end_with_log(turn: ChatTurn, client: redis.Redis) -> bool:
    claim = transitions.take_over_lost(turn)
    if claim is None:
        return False
    logged = _fence_and_read(client, turn)
    answer, attempts = _rebuilt(logged)
    ended = transitions.end(claim, WORKER_LOST, Result(answer.choices(), attempts=attempts))
    if ended:
        _append_end(client, turn, WORKER_LOST, attempt=len(attempts))
    return ended


def _fence_and_read(client: redis.Redis, turn: ChatTurn) -> list[Event]:
    key = events.log_key(turn.tenant_id, turn.public_id)
    _add(client, key, events.FENCE_SEQ, events.encode(events.FENCE, 0, {}))
    entries = cast(_Entries, client.xrange(key, max=f"({events.FENCE_SEQ}-0"))
    return [events.decode(entry_id, fields[b"e"]) for entry_id, fields in entries]


def _append_end(client: redis.Redis, turn: ChatTurn, ending: Ending, attempt: int) -> None:
    key = events.log_key(turn.tenant_id, turn.public_id)
    _add(client, key, events.END_SEQ, events.encode(events.END, attempt, end_data(ending)))
    client.expire(key, settings.EVENT_LOG_TTL_SECONDS)


def _add(client: redis.Redis, key: str, seq: int, payload: bytes) -> None:
    try:
        client.xadd(key, {"e": payload}, id=f"{seq}-0")
    except ResponseError:
        # It is there already, or the end is: somebody else was here first, and died or finished.
        last = cast(_Entries, client.xrevrange(key, count=1))
        if not last or events.seq_of(last[0][0]) < seq:
            raise


def _rebuilt(logged: list[Event]) -> tuple[Answer, list[ChatAttempt]]:
    answer, attempts = Answer(), []
    for event in logged:
        if event.type == events.DELTA:
            answer.add(event.data["choice"], event.data["delta"], event.data.get("logprobs"))
        elif event.type == events.FINISH:
            answer.finish(event.data["choice"], event.data["finish_reason"])
        elif event.type == events.ATTEMPT:
            attempts.append(_cut_off(event))
    return answer, attempts


def _cut_off(event: Event) -> ChatAttempt:
    return ChatAttempt(
        number=event.attempt,
        started_at=datetime.fromisoformat(event.data["started_at"]),
        end_state=TurnState.INTERRUPTED,
        error_kind=WORKER_LOST.error_kind,
    )


_asking = threading.Lock()
_answers: list[tuple[float, bool | None]] = []


def worker_is_there() -> bool | None:
    """Whether a worker takes chat turns; None where the broker does not answer. An answer holds for a few seconds."""
    with _asking:
        if _answers and time.monotonic() - _answers[0][0] < _ANSWER_HOLDS_S:
            return _answers[0][1]
        found = True if _works_now() else _ask()
        _answers[:] = [(time.monotonic(), found)]
        return found


def _works_now() -> bool:
    """Whether a worker keeps a lease: one that is busy may be slow to answer."""
    held = ChatTurn.objects.filter(state=TurnState.RUNNING, lease_expires_at__gt=Now())
    return held.exclude(origin=TurnOrigin.COMMAND).exists()


def _ask() -> bool | None:
    try:
        return any(workers.takers("chat", seconds) for seconds in _ASK_S)
    except (*UNREACHABLE, OperationalError) as error:
        logger.warning("the broker cannot be asked for workers: %s", type(error).__name__)
        return None
