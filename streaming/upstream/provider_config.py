"""How to reach a provider's chat endpoint: made from its row, then used on the loop without the database."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from embeddings.providers.base import api_key
from embeddings.states import ProviderKind
from streaming.upstream.budgets import ChatBudgets, resolve_budgets

if TYPE_CHECKING:
    from embeddings.models import Provider

# The path, from a kind's base URL, of its OpenAI-compatible endpoint.
_OPENAI_AT = {ProviderKind.OLLAMA: "/v1", ProviderKind.GEMINI: "/openai"}


@dataclass(frozen=True)
class ProviderConfig:
    """How to reach one provider. `provider_id` names it across attempts: its client is kept and reused.

    `lenient` accepts answers whose stream ends with `[DONE]` but no finish reason.
    """

    provider_id: Hashable
    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    budgets: ChatBudgets = field(default_factory=ChatBudgets)
    lenient: bool = False


def config_of(provider: Provider) -> ProviderConfig:
    """The provider's chat configuration. Raises ProviderConfigurationError where its key is not set, InvalidBudgetError."""
    return ProviderConfig(
        provider_id=provider.pk,
        base_url=provider.base_url + _OPENAI_AT.get(ProviderKind(provider.kind), ""),
        model=provider.chat_model,
        api_key=api_key(provider),
        budgets=resolve_budgets(
            request_timeout_ms=provider.request_timeout_ms,
            stream_first_content_timeout_ms=provider.stream_first_content_timeout_ms,
            stream_idle_timeout_ms=provider.stream_idle_timeout_ms,
            stream_keepalive_timeout_ms=provider.stream_keepalive_timeout_ms,
            stream_lifetime_ms=provider.stream_lifetime_ms,
            turn_wall_ms=provider.turn_wall_ms,
        ),
        lenient=provider.accepts_missing_finish,
    )
