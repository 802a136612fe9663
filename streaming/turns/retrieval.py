"""Retrieval: the question of a turn, the tenant's rows nearest to it, and the excerpts that the model is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.conf import settings

from embeddings.models import Tenant
from embeddings.query.search import QUERY_CHARACTERS_MAX, SearchHit, search

_INSTRUCTION = (
    "Answer from these numbered excerpts of the knowledge base, and cite those that you use by their number, like [1]. "
    "If they do not hold the answer, say so."
)


def question_of(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the last message of the user."""
    asked = [message for message in messages if message.get("role") == "user"]
    return content_text(asked[-1].get("content")) if asked else ""


def content_text(content: Any) -> str:
    """A message's content as text: it may be a list of parts."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content or () if isinstance(part, dict) and part.get("text"))


def retrieve(tenant: Tenant, question: str, is_cancelled: Callable[[], bool]) -> list[SearchHit]:
    """The rows nearest to the question, best first, within the bound on characters. Raises what search raises."""
    if not question.strip():
        return []
    hits = search(tenant, question[:QUERY_CHARACTERS_MAX], settings.CHAT_KNOWLEDGE_ROWS, is_cancelled=is_cancelled)
    # The first always: an excerpt that is too long is better than none.
    room = settings.CHAT_KNOWLEDGE_CHARACTERS
    kept: list[SearchHit] = []
    for hit in hits:
        room -= len(hit.text)
        if kept and room < 0:
            break
        kept.append(hit)
    return kept


def sources_of(hits: Sequence[SearchHit]) -> list[dict[str, Any]]:
    """The sources as a turn keeps and shows them, numbered as in the prompt."""
    return [
        {
            "number": number,
            "repository": hit.repository,
            "path": hit.path,
            "start_line": hit.start_line,
            "end_line": hit.end_line,
            "score": round(float(hit.score), 4),
        }
        for number, hit in enumerate(hits, start=1)
    ]


def with_excerpts(messages: list[dict[str, Any]], hits: Sequence[SearchHit]) -> list[dict[str, Any]]:
    """The messages with the excerpts in the system message, which is added where there is none.

    One system message in front: many chat templates accept no other.
    """
    if not hits:
        return messages
    excerpts = "\n\n".join(
        f"[{number}] {hit.repository}/{hit.path}, lines {hit.start_line}-{hit.end_line}:\n{hit.text}"
        for number, hit in enumerate(hits, start=1)
    )
    system = f"{_INSTRUCTION}\n\n{excerpts}"
    if messages and messages[0].get("role") in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{content_text(first.get('content'))}\n\n{system}"}, *messages[1:]]
    return [{"role": "system", "content": system}, *messages]
