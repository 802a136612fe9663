"""Orphaned turns: the worker's lease has run out, or no worker runs at all. Any reader, or beat, ends them.

The text of an orphaned turn is rebuilt from its log. The log is fenced before it is read, so that a worker that is still alive
appends nothing after the text that was stored (docs/architecture.md, Chat).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, cast

import redis
from django.conf import settings
from django.db.models import QuerySet
from django.db.models.functions import Now
from kombu.exceptions import OperationalError
from redis.exceptions import ResponseError

from embeddings.runtime import workers
from embeddings.runtime.clock import LeaseExpiry
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

# Entries as redis-py returns them: id and fields.
_Entries = list[tuple[bytes, dict[bytes, bytes]]]

WORKER_LOST = Ending(TurnState.INTERRUPTED, codes.WORKER_LOST, "worker_lost", detail="The worker that ran it is gone.")
NO_WORKER = Ending(
    TurnState.INTERRUPTED,
    codes.NO_WORKER,
    "no_worker",
    detail=f"No worker takes chat turns: start one with `{workers.START['chat']}`.",
)
# A turn whose log is still away this long after its lease ran out ends without its text.
LOG_TIMEOUT = timedelta(seconds=60)
# While the broker is away, nothing is known of workers. A turn that has waited this long ends all the same.
BROKER_TIMEOUT = timedelta(seconds=30)
# Ask twice before concluding that no worker runs: one on a busy machine may answer late.
_ASK_S = (1.0, 3.0)
_ANSWER_VALID_S = 3.0


def end_orphaned(turn: ChatTurn) -> bool:
    """Ends a running turn whose lease has run out, with the text of its log. Returns whether this call ended it."""
    if not ChatTurn.objects.filter(transitions.ORPHANED, pk=turn.pk).exists():
        return False
    try:
        with connect() as client:
            client.ping()
            return _end_with_log(turn, client)
    except UNREACHABLE as error:
        logger.warning("turn=%s: its log cannot be read: %s", turn.public_id, type(error).__name__)
        if not ChatTurn.objects.filter(pk=turn.pk, lease_expires_at__lt=LeaseExpiry() - LOG_TIMEOUT).exists():
            return False
        claim = transitions.take_over_orphaned(turn)
        return claim is not None and transitions.end(claim, WORKER_LOST, Result())


def end_unclaimed(turn: ChatTurn) -> bool:
    """Ends a turn that has been queued for long if no worker runs, else wakes one again. Returns whether it ended the turn."""
    if not _queued_for(timedelta(milliseconds=settings.CHAT_CLAIM_WAIT_MS)).filter(pk=turn.pk).exists():
        return False
    is_running = worker_is_running()
    if is_running is None and not _queued_for(BROKER_TIMEOUT).filter(pk=turn.pk).exists():
        return False
    if is_running:
        transitions.notify_worker_again(turn)
        return False
    ended = transitions.end_unclaimed(turn, NO_WORKER)
    if ended:
        append_end(turn, NO_WORKER)
    return ended


def overdue_turns() -> Iterable[ChatTurn]:
    """Orphaned turns, and those that have been queued for long."""
    queued = _queued_for(timedelta(milliseconds=settings.CHAT_CLAIM_WAIT_MS))
    return [*ChatTurn.objects.filter(transitions.ORPHANED), *queued]


def _queued_for(at_least: timedelta) -> QuerySet[ChatTurn]:
    return ChatTurn.objects.filter(state=TurnState.QUEUED, created_at__lt=Now() - at_least)


def append_end(turn: ChatTurn, ending: Ending) -> None:
    """Appends the end to the turn's log; readers that miss it find the end in the database a second later."""
    try:
        with connect() as client:
            _append_end(client, turn, ending, attempt=0)
    except UNREACHABLE as error:
        logger.warning("turn=%s: its end could not be logged: %s", turn.public_id, type(error).__name__)


def _end_with_log(turn: ChatTurn, client: redis.Redis) -> bool:
    claim = transitions.take_over_orphaned(turn)
    if claim is None:
        return False
    logged = _fence_and_read(client, turn)
    answer, attempts, fields = _rebuilt(logged)
    ended = transitions.end(claim, WORKER_LOST, Result(answer.choices(), attempts=attempts, fields=fields))
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
        # Already appended, or followed by the end: another process was first.
        last = cast(_Entries, client.xrevrange(key, count=1))
        if not last or events.seq_of(last[0][0]) < seq:
            raise


def _rebuilt(logged: list[Event]) -> tuple[Answer, list[ChatAttempt], dict[str, Any]]:
    answer, attempts = Answer(), []
    fields: dict[str, Any] = {}
    for event in logged:
        data = event.data
        if event.type == events.DELTA:
            answer.add(data["choice"], data["delta"], data.get("fields"))
            fields |= data.get("chunk_fields", {})
        elif event.type == events.FINISH:
            answer.finish(data["choice"], data["finish_reason"], data.get("fields"))
        elif event.type == events.FIELDS:
            fields |= data["fields"]
        elif event.type == events.ATTEMPT:
            interrupted = {"end_state": TurnState.INTERRUPTED, "error_kind": WORKER_LOST.error_kind}
            started_at = datetime.fromisoformat(data["started_at"])
            attempts.append(ChatAttempt(number=event.attempt, started_at=started_at, **interrupted))
    fields.pop("usage", None)
    return answer, attempts, fields


_asking = threading.Lock()
_answers: list[tuple[float, bool | None]] = []


def worker_is_running() -> bool | None:
    """Whether a worker consumes chat turns; None where the broker does not answer. Cached for a few seconds.

    A "no" is valid no longer than a turn waits before this is asked, so that it was found while that turn stood queued:
    a worker that has just started would otherwise lose it to the "no" of before.
    """
    with _asking:
        if _answers:
            answered_at, is_running = _answers[0]
            valid_s = _ANSWER_VALID_S if is_running else min(_ANSWER_VALID_S, settings.CHAT_CLAIM_WAIT_MS / 1000)
            if time.monotonic() - answered_at < valid_s:
                return is_running
        # A worker that keeps a lease may be too busy to answer.
        held = ChatTurn.objects.filter(state=TurnState.RUNNING, lease_expires_at__gt=Now())
        is_running = True if held.exclude(origin=TurnOrigin.COMMAND).exists() else _ask()
        _answers[:] = [(time.monotonic(), is_running)]
        return is_running


def _ask() -> bool | None:
    try:
        return any(workers.takers("chat", seconds) for seconds in _ASK_S)
    except (*UNREACHABLE, OperationalError) as error:
        logger.warning("the broker cannot be asked for workers: %s", type(error).__name__)
        return None
