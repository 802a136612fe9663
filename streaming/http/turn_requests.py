"""What every chat door does: turns a checked request into a stored turn, finds a turn for its tenant, renders one."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core import signing
from django.db import transaction

from embeddings.models import Tenant
from embeddings.registry.access import NotFound
from streaming.http.requests import ChatCompletionRequest, NewTurnRequest
from streaming.models import ChatAttempt, ChatTurn
from streaming.refusals import TooManyTurns
from streaming.states import TurnOrigin, TurnState
from streaming.turns import orphaned_turns, transitions
from streaming.turns.conversations import messages_before, resolve
from streaming.turns.model_list import choose, default_offer
from streaming.turns.transitions import Claim, NewTurn

TOKEN_LIVES_S = 900
_TOKEN_SALT = "streaming.turn-events"  # noqa: S105 - names what is signed


def take_completion(tenant: Tenant, body: ChatCompletionRequest, request: dict[str, Any]) -> ChatTurn:
    """Stores the turn of an OpenAI client, not rung for yet. Raises UnknownModel, TooManyTurns."""
    offer = choose(tenant, body.model)
    return transitions.take(NewTurn(tenant, offer, request, TurnOrigin.OPENAI))


def take_native(tenant: Tenant, body: NewTurnRequest, request: dict[str, Any]) -> ChatTurn:
    """Stores a turn of the turn API, not rung for yet. Raises UnknownModel, UnknownConversation, TooManyTurns."""
    offer = choose(tenant, body.model) if body.model else default_offer(tenant, uses_knowledge=body.knowledge)
    # A turn that is refused leaves no new conversation behind.
    with transaction.atomic():
        conversation = resolve(tenant, body.conversation, request["messages"])
        if conversation is not None:
            request = request | {"messages": [*messages_before(conversation), *request["messages"]]}
        return transitions.take(NewTurn(tenant, offer, request, TurnOrigin.NATIVE, conversation))


def take_claimed(new: NewTurn) -> tuple[ChatTurn, Claim]:
    """Stores the turn for a caller that runs it itself. Raises TooManyTurns."""
    try:
        return transitions.take_claimed(new)
    except TooManyTurns:
        make_room(new.tenant)
        return transitions.take_claimed(new)


def make_room(tenant: Tenant) -> None:
    """Ends the tenant's turns whose worker is gone: they count until somebody does. Waits for the event log."""
    for lost in ChatTurn.objects.filter(tenant=tenant, state=TurnState.RUNNING):
        orphaned_turns.end_lost(lost)


def find_turn(tenant: Tenant, public_id: UUID) -> ChatTurn:
    """The tenant's turn. Raises NotFound, also for another tenant's."""
    turns = ChatTurn.objects.select_related("provider", "conversation").filter(tenant=tenant, public_id=public_id)
    if (found := turns.first()) is None:
        raise NotFound("There is no such turn.")
    return found


def cancel(found: ChatTurn) -> ChatTurn:
    """Asks for the turn's cancellation; the turn as it is now."""
    was_queued = found.state == TurnState.QUEUED
    transitions.request_cancel(found)
    found.refresh_from_db()
    if was_queued and found.state == TurnState.CANCELLED:
        orphaned_turns.append_end(found, transitions.ending_of(found))
    return found


def event_token(found: ChatTurn) -> str:
    """A token that reads this one turn for a quarter of an hour: for a page, which must not hold a tenant's key."""
    return signing.dumps(str(found.public_id), salt=_TOKEN_SALT)


def turn_of_token(token: str, public_id: UUID) -> ChatTurn:
    """The turn that the token was made for. Raises NotFound for another turn, and for a token that is over."""
    try:
        named = signing.loads(token, salt=_TOKEN_SALT, max_age=TOKEN_LIVES_S)
    except signing.BadSignature:
        named = None
    turns = ChatTurn.objects.select_related("provider", "conversation", "tenant").filter(tenant__is_active=True)
    found = turns.filter(public_id=public_id).first() if named == str(public_id) else None
    if found is None:
        raise NotFound("There is no such turn, or the token is over.")
    return found


def rendered(found: ChatTurn) -> dict[str, Any]:
    """The turn as the turn API shows it."""
    return {
        "id": str(found.public_id),
        "state": found.state,
        "stage": found.stage,
        "model": found.model,
        "conversation": str(found.conversation.public_id) if found.conversation else None,
        "answer": found.answer,
        "choices": found.choices,
        "sources": found.sources,
        "usage": found.usage,
        "error": _error_of(found),
        "attempts": [_attempt(attempt) for attempt in found.attempts.all()],
        "created_at": found.created_at,
        "started_at": found.started_at,
        "first_content_at": found.first_content_at,
        "ended_at": found.ended_at,
    }


def _error_of(found: ChatTurn) -> dict[str, Any] | None:
    if not found.has_ended or found.state == TurnState.COMPLETED:
        return None
    return {
        "code": found.error_code,
        "kind": found.error_kind,
        "message": found.error_detail,
        "status": found.error_status,
    }


def _attempt(attempt: ChatAttempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "end_state": attempt.end_state,
        "error_kind": attempt.error_kind,
        "transport_code": attempt.transport_code,
        "chunks": attempt.chunks,
        "bytes": attempt.bytes,
        "first_content_ms": attempt.first_content_ms,
    }
