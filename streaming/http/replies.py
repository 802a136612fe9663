"""HTTP replies that follow a turn: a stream of server-sent events, or one body at its end (docs/architecture.md, Chat)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from django.conf import settings
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse

from project.runtime.database_threads import in_background, in_waiting_thread
from streaming import codes
from streaming.http import sse
from streaming.http.openai_shape import Shape, error_of
from streaming.log import events
from streaming.log.events import Event
from streaming.models import ChatTurn
from streaming.states import TurnState
from streaming.turns import transitions
from streaming.turns.follow import follow, stored_end

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", HttpResponse, StreamingHttpResponse)

_SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def completion(turn: ChatTurn) -> HttpResponse:
    """The whole answer as a `chat.completion`, or the turn's error. A hang-up cancels the turn."""
    async with cancelled_by_hang_up(turn), aclosing(follow(turn)) as followed:
        async for _ in followed:
            pass
    ended = await stored_end(turn)
    if ended.state == TurnState.COMPLETED or ended.error_code == codes.ANSWER_TOO_LONG:
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "length"} for choice in ended.choices]
        return _with_turn(
            turn, JsonResponse(_shape(turn).completion(choices, ended.usage, ended.sources, ended.reply_fields))
        )
    return _error(turn, transitions.end_data(transitions.ending_of(ended)))


async def completion_stream(turn: ChatTurn, *, include_usage: bool) -> HttpResponse | StreamingHttpResponse:
    """The answer as chunks. The status waits for the first delta or the end; after CHAT_STATUS_WAIT_MS it is a 200."""
    stream = sse.OpenAIStream(_shape(turn), include_usage=include_usage)
    followed = follow(turn)
    async with cancelled_by_hang_up(turn):
        due = time.monotonic() + settings.CHAT_STATUS_WAIT_MS / 1000
        begun = []
        async for event in followed:
            if event.type != events.TICK:
                begun.append(event)
            if event.type in (events.DELTA, events.END) or time.monotonic() >= due:
                break
    has_text = any(event.type == events.DELTA for event in begun)
    if begun and begun[-1].is_end and begun[-1].data["state"] != TurnState.COMPLETED and not has_text:
        return _error(turn, begun[-1].data)
    body = _ChunkBody(turn, followed, stream, begun)
    return _with_turn(turn, StreamingHttpResponse(body, headers=_SSE))


def event_stream(turn: ChatTurn, after: int) -> StreamingHttpResponse:
    """The native stream of a turn's events after seq `after`. A hang-up does not cancel the turn."""
    return StreamingHttpResponse(_native(turn, after), headers=_SSE)


async def _native(turn: ChatTurn, after: int) -> AsyncIterator[bytes]:
    sent_at = time.monotonic()
    async with aclosing(follow(turn, after)) as followed:
        async for event in followed:
            if event.type != events.TICK:
                yield sse.native(event)
            elif time.monotonic() - sent_at >= settings.CHAT_HEARTBEAT_MS / 1000:
                yield sse.HEARTBEAT
            else:
                continue
            sent_at = time.monotonic()


class _ChunkBody:
    """The chunks of a reply. Django calls `close` however the reply ends; it cancels a turn that has not ended."""

    def __init__(
        self, turn: ChatTurn, followed: AsyncGenerator[Event, None], stream: sse.OpenAIStream, begun: list[Event]
    ) -> None:
        self._turn = turn
        self._followed = followed
        self._stream = stream
        self._begun = begun
        self._has_ended = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # Django sends the status with the first bytes.
        if not any(event.type in (events.DELTA, events.END) for event in self._begun):
            yield self._stream.keep_alive()
        sent_at = time.monotonic()
        async with aclosing(self._events()) as all_events:
            async for event in all_events:
                chunk = self._stream.render(event)
                if not chunk and time.monotonic() - sent_at >= settings.CHAT_HEARTBEAT_MS / 1000:
                    chunk = self._stream.keep_alive()
                if chunk:
                    sent_at = time.monotonic()
                    yield chunk
                self._has_ended = event.is_end

    async def _events(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._followed):
            for event in self._begun:
                yield event
            if not (self._begun and self._begun[-1].is_end):
                async for event in self._followed:
                    yield event

    def close(self) -> None:
        if not self._has_ended:
            # Django closes all replies in one thread, which must not wait for a database that is away.
            in_background(transitions.request_cancel_surely, self._turn)


class cancelled_by_hang_up:
    """Cancels the turn if the client disconnects before the reply is complete."""

    def __init__(self, turn: ChatTurn) -> None:
        self._turn = turn

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # Shielded: a second cancellation of this request must not leave the turn running without a client.
            await asyncio.shield(in_waiting_thread(transitions.request_cancel_surely, self._turn))


def _shape(turn: ChatTurn) -> Shape:
    return Shape(turn.public_id, turn.model, turn.created_at)


def _error(turn: ChatTurn, end: dict[str, Any]) -> HttpResponse:
    error = error_of(end)
    return _with_turn(turn, JsonResponse(error.body(), status=error.status, headers=error.headers()))


def _with_turn(turn: ChatTurn, reply: Reply) -> Reply:
    """Adds the turn's id as the request id, which OpenAI's clients show."""
    reply["x-request-id"] = str(turn.public_id)
    return reply
