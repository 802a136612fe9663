"""Runs one claimed turn: retrieve, attempt, perhaps attempt again, end (docs/architecture.md, Chat).

The thread does what needs the database and holds no connection while the loop streams. The end is committed before it
is logged. Works in a worker and in a command alike.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import connections
from django.utils import timezone

from embeddings.errors import ProviderError, SluicegateError, TaskExpired
from embeddings.query.search import SearchHit
from embeddings.timeouts import ProviderTimeoutError, is_provider_timeout
from project.runtime import event_loop
from project.runtime.database_threads import in_fifo_thread
from project.runtime.error_place import place_of
from streaming import codes
from streaming.log import events
from streaming.log.answer import Answer
from streaming.log.recorder import Listener, Recorder
from streaming.log.writer import TurnLog, event_writer
from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TurnStage, TurnState
from streaming.turns import claims, fairness, transitions
from streaming.turns.claims import HeldClaim
from streaming.turns.retrieval import question_of, retrieve, sources_of, with_excerpts
from streaming.turns.transitions import Claim, Ending, Result
from streaming.upstream.budgets import InvalidBudgetError
from streaming.upstream.errors import EndState
from streaming.upstream.pipeline import AttemptResult, ProviderConfig, open_attempt
from streaming.upstream.provider_config import config_of
from streaming.upstream.retry import RetryKind, RetryPolicy, decide_retry

logger = logging.getLogger(__name__)

# Do not wait longer for the log: readers that miss the end event find it in the database.
CLOSE_LOG_S = 2.0

SHUT_DOWN = Ending(
    TurnState.INTERRUPTED, codes.WORKER_SHUT_DOWN, "shut_down", detail="The worker that ran it was shut down."
)
CANCELLED = Ending(TurnState.CANCELLED, codes.USER_CANCELLED, "user", detail="The turn was cancelled.")
INTERNAL_ERROR = Ending(
    TurnState.INTERRUPTED, codes.INTERNAL_ERROR, "internal_error", detail="The turn ended by an error of our own."
)
TOO_LONG = Ending(
    TurnState.TRUNCATED,
    codes.ANSWER_TOO_LONG,
    "answer_too_long",
    detail="The answer was longer than CHAT_ANSWER_CHARACTERS_MAX allows.",
)
TURN_WALL = Ending(
    TurnState.LIFETIME_EXCEEDED, codes.TURN_WALL, "wall", detail="The turn took longer than its wall clock budget."
)


@dataclass(frozen=True)
class _Work:
    """The facts of a turn that the loop needs, without access to the database."""

    turn: str
    config: ProviderConfig
    request: dict[str, Any]
    sources: list[dict[str, Any]]
    # On the loop's monotonic clock; None for never.
    deadline: float | None

    @property
    def label(self) -> str:
        return f"turn={self.turn}"


@dataclass
class _Outcome:
    ending: Ending = INTERNAL_ERROR
    answer: Answer = field(default_factory=Answer)
    usage: dict[str, Any] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    attempts: list[ChatAttempt] = field(default_factory=list)
    first_content_at: datetime | None = None

    def result(self) -> Result:
        return Result(self.answer.choices(), self.usage, self.attempts, self.fields)


def run(turn: ChatTurn, claim: Claim, *, listener: Listener | None = None) -> Ending | None:
    """Runs the turn and stores its end, which is returned; None if the claim was lost."""
    with claims.held(claim) as held:
        return run_held(turn, held, listener=listener)


def run_held(turn: ChatTurn, held: HeldClaim, *, listener: Listener | None = None) -> Ending | None:
    """The same under a claim that the caller holds."""
    # Not awaited: the thread's next step needs the loop anyway.
    opening = event_loop.submit(_open(turn))
    outcome = _Outcome()
    try:
        prepared = _prepare(turn, held)
        if isinstance(prepared, Ending):
            outcome.ending = prepared
        else:
            event_loop.run(_Streaming(prepared, held, outcome).run(opening, listener))
    except Exception as error:
        # Whatever it was, the turn must end; its text so far is kept.
        logger.error("turn=%s failed: %s", turn.public_id, place_of(error))
    log = opening.result()
    if held.is_lost or not in_fifo_thread(
        transitions.end, held.claim, outcome.ending, outcome.result(), outcome.first_content_at
    ):
        event_loop.run(_abandon(log))
        logger.warning("turn=%s lost its claim: nothing more is written", turn.public_id)
        return None
    event_loop.run(log.close(len(outcome.attempts), transitions.end_data(outcome.ending), CLOSE_LOG_S))
    ending = outcome.ending
    facts = (turn.public_id, ending.state.value, ending.error_code or "-", len(outcome.attempts))
    logger.info("turn=%s ended: state=%s code=%s attempts=%d", *facts)
    return ending


def _prepare(turn: ChatTurn, held: HeldClaim) -> _Work | Ending:
    """The request and its provider, with the tenant's rows retrieved if the turn is over its knowledge; or the turn's end."""
    try:
        config = config_of(turn.provider)
    except (ProviderError, InvalidBudgetError) as error:
        return Ending(TurnState.PROVIDER_ERROR, error.code, "configuration", detail=str(error))
    wall_ms = config.budgets.turn_wall_ms
    deadline = time.monotonic() + wall_ms / 1000 if wall_ms else None
    request, sources = turn.request, []
    if turn.uses_knowledge:
        try:
            hits = _retrieve(turn, held, deadline)
        except (SluicegateError, ProviderTimeoutError) as error:
            return _interruption(held) if held.is_interrupted else _retrieval_failed(error, deadline)
        sources = sources_of(hits)
        request = request | {"messages": with_excerpts(request["messages"], hits)}
    return _Work(str(turn.public_id), config, request, sources, deadline)


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _retrieve(turn: ChatTurn, held: HeldClaim, deadline: float | None) -> list[SearchHit]:
    question = question_of(turn.request["messages"])
    try:
        hits = retrieve(turn.tenant, question, lambda: held.is_interrupted or _is_past(deadline))
    finally:
        # A thread that waits for a provider holds no connection: there are more threads than connections.
        connections.close_all()
    sources = events.storable(sources_of(hits))
    in_fifo_thread(transitions.enter, held.claim, TurnStage.STREAMING, sources=sources)
    return hits


def _retrieval_failed(error: SluicegateError | ProviderTimeoutError, deadline: float | None) -> Ending:
    if _is_past(deadline):
        return TURN_WALL
    timed_out = is_provider_timeout(error) or isinstance(error, TaskExpired)
    return Ending(
        TurnState.PROVIDER_ERROR,
        error.code,
        "retrieval_timeout" if timed_out else "retrieval",
        detail=f"The question could not be embedded: {error}",
    )


def _interruption(held: HeldClaim) -> Ending:
    return CANCELLED if held.is_cancelled else SHUT_DOWN


class _Streaming:
    """The attempts of one turn, on the loop. `outcome` holds the result, however they end."""

    def __init__(self, work: _Work, held: HeldClaim, outcome: _Outcome) -> None:
        self._work = work
        self._held = held
        self._outcome = outcome

    async def run(self, opening: Future[TurnLog], listener: Listener | None) -> None:
        recorder = Recorder(await asyncio.wrap_future(opening), settings.CHAT_ANSWER_CHARACTERS_MAX, listener)
        self._outcome.answer = recorder.answer
        if self._work.sources:
            recorder.event(events.SOURCES, 0, {"sources": self._work.sources})
        try:
            async with asyncio.timeout_at(self._work.deadline):
                self._held.attach()
                self._outcome.ending = await self._attempts(recorder)
        except TimeoutError:
            self._outcome.ending = TURN_WALL
        except asyncio.CancelledError:
            self._outcome.ending = _interruption(self._held)
        finally:
            self._held.detach()
            recorder.flush()

    async def _attempts(self, recorder: Recorder) -> Ending:
        policy = RetryPolicy(base_delay_ms=settings.CHAT_RETRY_BASE_MS)
        transport = content = 0
        while True:
            result = await self._attempt(recorder, len(self._outcome.attempts) + 1)
            if recorder.is_full:
                return TOO_LONG
            decision = decide_retry(
                result.classification,
                delivered=result.delivered,
                transport_retries=transport,
                content_retries=content,
                policy=policy,
            )
            if not decision.retry:
                return _ending_of(result)
            logger.info("%s tries again: %s", self._work.label, decision.reason)
            content += decision.counts_as is RetryKind.CONTENT
            transport += decision.counts_as is not RetryKind.CONTENT
            await asyncio.sleep(decision.delay_ms / 1000)

    async def _attempt(self, recorder: Recorder, number: int) -> AttemptResult:
        recorder.event(events.ATTEMPT, number, {"started_at": timezone.now().isoformat()})
        attempt = open_attempt(
            self._work.config,
            self._work.request,
            is_cancelled=lambda: self._held.is_cancelled,
            label=f"{self._work.label} attempt={number}",
        )
        taken = 0
        try:
            async with attempt:
                async for delta in attempt:
                    recorder.delta(delta)
                    if recorder.is_full:
                        break
                    taken += 1
                    # One packet may hold hundreds of deltas.
                    if taken % fairness.SHARE == 0:
                        await fairness.after_share()
        finally:
            recorder.flush()
            self._note(attempt.result, number, recorder)
        return attempt.result

    def _note(self, result: AttemptResult, number: int, recorder: Recorder) -> None:
        outcome = self._outcome
        outcome.attempts.append(_row_of(result, number, is_full=recorder.is_full))
        outcome.first_content_at = outcome.first_content_at or result.first_content_at
        outcome.fields = dict(result.reply_fields)
        recorder.reply_fields(outcome.fields)
        # An answer that our bound has cut did not finish, though a finish reason may be in the same packet.
        for choice, reason in sorted(() if recorder.is_full else result.finish_reasons.items()):
            recorder.finish(choice, reason, result.finish_fields.get(choice))
        if result.usage:
            outcome.usage = dict(result.usage)
            recorder.event(events.USAGE, number, {"usage": outcome.usage})


def _row_of(result: AttemptResult, number: int, *, is_full: bool) -> ChatAttempt:
    return ChatAttempt(
        number=number,
        started_at=result.started_at,
        ended_at=result.ended_at,
        first_content_at=result.first_content_at,
        first_content_ms=result.first_content_ms,
        longest_gap_ms=result.longest_gap_ms,
        chunks=result.chunks,
        bytes=result.bytes,
        end_state=TOO_LONG.state if is_full else result.end_state.value,
        error_kind=TOO_LONG.error_kind if is_full else result.error_kind[:40],
        transport_code=result.transport_code or "",
    )


def _ending_of(result: AttemptResult) -> Ending:
    if result.end_state is EndState.COMPLETED:
        return Ending(TurnState.COMPLETED)
    return Ending(
        TurnState(result.end_state.value),
        result.error_code,
        result.error_kind,
        result.status,
        getattr(result.error, "detail", "") or result.detail,
        result.classification.retry_after_ms,
        getattr(result.error, "provider_code", None) or "",
        getattr(result.error, "param", None) or "",
    )


async def _open(turn: ChatTurn) -> TurnLog:
    log = event_writer().open(turn.tenant_id, turn.public_id)
    log.append(events.START, 0, {"turn": str(turn.public_id), "model": turn.model})
    return log


async def _abandon(log: TurnLog) -> None:
    log.abandon()
