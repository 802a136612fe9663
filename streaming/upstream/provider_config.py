"""From a provider's row to how its chat endpoint is reached, on the loop, without the database."""

from __future__ import annotations

from embeddings.models import Provider
from embeddings.providers.base import api_key
from embeddings.states import ProviderKind
from streaming.upstream.budgets import resolve_budgets
from streaming.upstream.pipeline import ProviderConfig

# Where each kind speaks OpenAI's protocol, from its own base URL.
_OPENAI_AT = {ProviderKind.OLLAMA: "/v1", ProviderKind.GEMINI: "/openai"}


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
