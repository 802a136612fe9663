"""Operations on turns for the endpoints, the command and the admin: store, find, cancel and render."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core import signing
from django.db import transaction

from embeddings.models import Tenant
from embeddings.registry.access import NotFound
from streaming.http.requests import ChatCompletionRequest, NewTurnRequest
from streaming.models import ChatTurn
from streaming.refusals import TooManyTurns
from streaming.states import TurnOrigin, TurnState
from streaming.turns import orphaned_turns, transitions
from streaming.turns.conversations import messages_before, resolve
from streaming.turns.model_list import choose, default_model
from streaming.turns.transitions import Claim, NewTurn

TOKEN_LIVES_S = 900
_TOKEN_SALT = "streaming.turn-events"  # noqa: S105 - names what is signed


def take_completion(tenant: Tenant, body: ChatCompletionRequest, request: dict[str, Any]) -> ChatTurn:
    """Stores the turn of an OpenAI client and notifies no worker yet. Raises UnknownModel, TooManyTurns."""
    model = choose(tenant, body.model)
    return transitions.take(NewTurn(tenant, model, request, TurnOrigin.OPENAI))


def take_native(tenant: Tenant, body: NewTurnRequest, request: dict[str, Any]) -> ChatTurn:
    """Stores a turn of the turn API and notifies no worker yet. Raises UnknownModel, UnknownConversation, TooManyTurns."""
    model = choose(tenant, body.model) if body.model else default_model(tenant, uses_knowledge=body.knowledge)
    # One transaction: a refused turn must not leave a new conversation behind.
    with transaction.atomic():
        conversation = resolve(tenant, body.conversation, request["messages"])
        if conversation is not None:
            request = request | {"messages": [*messages_before(conversation), *request["messages"]]}
        return transitions.take(NewTurn(tenant, model, request, TurnOrigin.NATIVE, conversation))


def take_claimed(new: NewTurn) -> tuple[ChatTurn, Claim]:
    """Stores the turn for a caller that runs it itself. Raises TooManyTurns."""
    try:
        return transitions.take_claimed(new)
    except TooManyTurns:
        make_room(new.tenant)
        return transitions.take_claimed(new)


def make_room(tenant: Tenant) -> None:
    """Ends the tenant's orphaned turns, which count towards its limit until then. Waits for the event log."""
    for lost in ChatTurn.objects.filter(tenant=tenant, state=TurnState.RUNNING):
        orphaned_turns.end_orphaned(lost)


def find_turn(tenant: Tenant, public_id: UUID) -> ChatTurn:
    """The tenant's turn. Raises NotFound, also for another tenant's turn."""
    turns = ChatTurn.objects.select_related("provider", "conversation").filter(tenant=tenant, public_id=public_id)
    if (turn := turns.first()) is None:
        raise NotFound("There is no such turn.")
    return turn


def cancel(turn: ChatTurn) -> ChatTurn:
    """Requests the turn's cancellation; returns its current state."""
    was_queued = turn.state == TurnState.QUEUED
    transitions.request_cancel(turn)
    turn.refresh_from_db()
    if was_queued and turn.state == TurnState.CANCELLED:
        orphaned_turns.append_end(turn, transitions.ending_of(turn))
    return turn


def event_token(turn: ChatTurn) -> str:
    """A token that reads this turn for TOKEN_LIVES_S seconds: for a web page, which must not hold a tenant's key."""
    return signing.dumps(str(turn.public_id), salt=_TOKEN_SALT)


def turn_of_token(token: str, public_id: UUID) -> ChatTurn:
    """The turn of this token. Raises NotFound for another turn and for an expired token."""
    try:
        named = signing.loads(token, salt=_TOKEN_SALT, max_age=TOKEN_LIVES_S)
    except signing.BadSignature:
        named = None
    turns = ChatTurn.objects.select_related("provider", "conversation", "tenant").filter(tenant__is_active=True)
    turn = turns.filter(public_id=public_id).first() if named == str(public_id) else None
    if turn is None:
        raise NotFound("There is no such turn, or the token has expired.")
    return turn


def rendered(turn: ChatTurn) -> dict[str, Any]:
    """The turn as the turn API shows it."""
    error = {
        "code": turn.error_code,
        "kind": turn.error_kind,
        "message": turn.error_detail,
        "status": turn.error_status,
        "provider_code": turn.provider_code,
        "param": turn.error_param,
    }
    attempts = [
        {
            "number": attempt.number,
            "end_state": attempt.end_state,
            "error_kind": attempt.error_kind,
            "transport_code": attempt.transport_code,
            "chunks": attempt.chunks,
            "bytes": attempt.bytes,
            "first_content_ms": attempt.first_content_ms,
        }
        for attempt in turn.attempts.all()
    ]
    return {
        "id": str(turn.public_id),
        "state": turn.state,
        "stage": turn.stage,
        "model": turn.model,
        "conversation": str(turn.conversation.public_id) if turn.conversation else None,
        "answer": turn.answer,
        "choices": turn.choices,
        "sources": turn.sources,
        "usage": turn.usage,
        "fields": turn.reply_fields,
        "error": error if turn.has_ended and turn.state != TurnState.COMPLETED else None,
        "attempts": attempts,
        "created_at": turn.created_at,
        "started_at": turn.started_at,
        "first_content_at": turn.first_content_at,
        "ended_at": turn.ended_at,
    }
