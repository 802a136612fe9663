"""Conversations: a turn in one follows the turns that completed before it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from embeddings.models import Tenant
from streaming.log.events import storable
from streaming.models import ChatTurn, Conversation
from streaming.refusals import UnknownConversation
from streaming.states import TurnState
from streaming.turns.retrieval import question_of

NEW = "new"
TURNS_REMEMBERED = 20
_TITLE_MAX = 80


def resolve(tenant: Tenant, wanted: str | None, messages: list[dict[str, Any]]) -> Conversation | None:
    """The conversation of this id, a new one for "new", none for None. Raises UnknownConversation."""
    if wanted is None:
        return None
    if wanted == NEW:
        return Conversation.objects.create(tenant=tenant, title=storable(question_of(messages)[:_TITLE_MAX]))
    try:
        return Conversation.objects.get(tenant=tenant, public_id=UUID(wanted))
    except (ValueError, Conversation.DoesNotExist):
        raise UnknownConversation("There is no such conversation.", param="conversation") from None


def messages_before(conversation: Conversation) -> list[dict[str, Any]]:
    """Its questions and answers, oldest first."""
    ended = ChatTurn.objects.filter(conversation=conversation, state=TurnState.COMPLETED).order_by("-id")
    messages: list[dict[str, Any]] = []
    for turn in reversed(ended[:TURNS_REMEMBERED]):
        messages.append({"role": "user", "content": question_of(turn.request["messages"])})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages
