"""The chat endpoints: OpenAI's under /v1, and the turn API under /api/chat (docs/architecture.md, Chat)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from ninja import Router, Status
from ninja.security import APIKeyQuery
from pydantic import Field

from embeddings.models import Tenant
from embeddings.registry import KeyScope
from embeddings.registry.access import NotFound, TenantKey, caller
from embeddings.runtime import wake_ups
from project.runtime.database_threads import in_database, in_fifo, in_waiting_thread
from streaming.http import replies, turn_requests
from streaming.http.embedding_requests import Embedded, embedded
from streaming.http.requests import (
    ChatCompletionRequest,
    EmbeddingRequest,
    NewTurnRequest,
    completion_for_provider,
    turn_for_provider,
)
from streaming.log.events import END_SEQ
from streaming.models import ChatTurn
from streaming.refusals import TooManyTurns, UnknownModel
from streaming.turns import transitions
from streaming.turns.model_list import chat_models

openai = Router(tags=["OpenAI"])
chat = Router(tags=["Chat"])

_SSE_REPLY = {"responses": {200: {"description": "Server-sent events", "content": {"text/event-stream": {}}}}}


@openai.post("/chat/completions", auth=TenantKey(KeyScope.CHAT, starts=True), summary="Chat completion")
async def chat_completions(request: HttpRequest, body: ChatCompletionRequest) -> HttpResponseBase:
    """Like OpenAI's. Unknown parameters are passed on. `<model>+knowledge` answers over the tenant's knowledge rows."""
    turn = await _taken(turn_requests.take_completion, caller(request), body, completion_for_provider(request))
    async with replies.cancelled_by_hang_up(turn):
        await wake_ups.in_notifying_thread(transitions.notify_worker, turn)
    if body.stream:
        return await replies.completion_stream(turn, include_usage=body.include_usage)
    return await replies.completion(turn)


@openai.get("/models", auth=TenantKey(KeyScope.CHAT), summary="Models")
async def models(request: HttpRequest) -> dict[str, Any]:
    """The models that the tenant may use."""
    return {"object": "list", "data": _models(caller(request))}


@openai.get("/models/{path:model}", auth=TenantKey(KeyScope.CHAT), summary="Model")
async def model(request: HttpRequest, model: str) -> dict[str, Any]:
    """One model. 404 if the tenant has none of this name."""
    for each in _models(caller(request)):
        if each["id"] == model:
            return each
    raise UnknownModel(f"The model {model[:200]!r} does not exist.", param="model")


@openai.post("/embeddings", auth=TenantKey(KeyScope.SEARCH), summary="Embeddings")
async def embeddings(request: HttpRequest, body: EmbeddingRequest) -> dict[str, Any]:
    """Like OpenAI's, for texts only; uses the tenant's embedding provider and its lane."""
    made: Embedded = await in_waiting_thread(embedded, caller(request), body)
    vectors = [
        base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        for vector in made.vectors
    ]
    return {
        "object": "list",
        "model": made.model,
        "data": [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)],
        # The lane does not count tokens, but clients require the fields.
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    }


@openai.api_operation(["GET", "POST", "PUT", "PATCH", "DELETE"], "/{path:rest}", include_in_schema=False)
async def elsewhere(request: HttpRequest, rest: str) -> None:
    """Answers any other OpenAI endpoint with an OpenAI error: some clients try the newest endpoints first."""
    served = "chat/completions, embeddings and models"
    raise NotFound(f"There is no {request.method} /v1/{rest[:200]} here. There is: {served}.")


class TurnToken(APIKeyQuery):
    """A turn's token as `?token=`: for a web page, which must not hold a tenant's key."""

    param_name = "token"

    async def authenticate(self, request: HttpRequest, key: str | None) -> str | None:
        return key or None


_READS = [TurnToken(), TenantKey(KeyScope.CHAT)]


@chat.post("/turns", auth=TenantKey(KeyScope.CHAT, starts=True), response={201: dict[str, Any]}, summary="Take a turn")
async def take_turn(request: HttpRequest, body: NewTurnRequest) -> Status[dict[str, Any]]:
    """Stores the turn and returns immediately. `events_token` reads its events for 15 minutes, without a key."""
    turn = await _taken(turn_requests.take_native, caller(request), body, turn_for_provider(request))
    await wake_ups.in_notifying_thread(transitions.notify_worker, turn)
    return Status(
        201, {**await in_database(turn_requests.rendered, turn), "events_token": turn_requests.event_token(turn)}
    )


@chat.get("/turns/{turn_id}", auth=_READS, summary="Turn")
async def show_turn(request: HttpRequest, turn_id: UUID) -> dict[str, Any]:
    """The current state of the turn; its text is stored when it ends."""
    turn = await in_database(_readable, request, turn_id)
    return await in_database(turn_requests.rendered, turn)


@chat.get("/turns/{turn_id}/events", auth=_READS, summary="Events of a turn", openapi_extra=_SSE_REPLY)
async def turn_events(request: HttpRequest, turn_id: UUID, after: Annotated[int, Field(ge=0)] = 0) -> HttpResponseBase:
    """Server-sent events from the start, or after `Last-Event-ID` (or `after`). A hang-up does not cancel the turn."""
    turn = await in_database(_readable, request, turn_id)
    last_id = request.headers.get("Last-Event-ID", "")
    seq = (int(last_id) if last_id.isdecimal() and len(last_id) <= 16 else 0) or after
    if seq >= END_SEQ:
        # The client has read the end: a 204 stops an EventSource.
        return HttpResponse(status=204)
    return replies.event_stream(turn, seq)


@chat.post("/turns/{turn_id}/cancel", auth=TenantKey(KeyScope.CHAT), summary="Cancel a turn")
async def cancel_turn(request: HttpRequest, turn_id: UUID) -> dict[str, Any]:
    """Ends a queued turn, requests the end of a running one; an ended turn does not change."""
    turn = await in_database(turn_requests.find_turn, caller(request), turn_id)
    turn = await in_waiting_thread(turn_requests.cancel, turn)
    return await in_database(turn_requests.rendered, turn)


async def _taken(take: Callable[..., ChatTurn], tenant: Tenant, *args: Any) -> ChatTurn:
    """Stores the turn in the FIFO executor; no worker is notified yet. The slow cleanup runs outside it, then one retry."""
    try:
        return await in_fifo(take, tenant, *args)
    except TooManyTurns:
        await in_waiting_thread(turn_requests.make_room, tenant)
        return await in_fifo(take, tenant, *args)


def _models(tenant: Tenant) -> list[dict[str, Any]]:
    names = [(model.name, model.provider) for model in chat_models(tenant)]
    if tenant.embedding_provider is not None and tenant.embedding_provider.embedding_model:
        names.append((tenant.embedding_provider.embedding_model, tenant.embedding_provider))
    return [
        {"id": name, "object": "model", "created": int(provider.created_at.timestamp()), "owned_by": tenant.slug}
        for name, provider in names
    ]


def _readable(request: Any, turn_id: UUID) -> ChatTurn:
    if isinstance(request.auth, str):
        return turn_requests.turn_of_token(request.auth, turn_id)
    return turn_requests.find_turn(request.auth, turn_id)
