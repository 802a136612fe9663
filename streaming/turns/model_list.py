"""The models that a tenant may chat with: its provider's chat model, plain or over its knowledge base."""

from __future__ import annotations

from dataclasses import dataclass

from embeddings.models import Provider, Tenant
from streaming.refusals import UnknownModel

KNOWLEDGE_SUFFIX = "+knowledge"


@dataclass(frozen=True)
class ChatModel:
    """A model under the name that a client uses. Over knowledge, answers are given excerpts of the tenant's rows."""

    name: str
    provider: Provider
    uses_knowledge: bool


def chat_models(tenant: Tenant) -> list[ChatModel]:
    """Every chat model of the tenant; over knowledge only where it has an embedding provider."""
    provider = tenant.chat_provider
    if provider is None or not provider.chat_model:
        return []
    plain = ChatModel(provider.chat_model, provider, uses_knowledge=False)
    if tenant.embedding_provider is None:
        return [plain]
    return [plain, ChatModel(provider.chat_model + KNOWLEDGE_SUFFIX, provider, uses_knowledge=True)]


def choose(tenant: Tenant, model: str) -> ChatModel:
    """The chat model of this name. Raises UnknownModel, which names those that exist."""
    known = {each.name: each for each in chat_models(tenant)}
    if model in known:
        return known[model]
    names = ", ".join(known) or "none, because the tenant has no chat provider"
    raise UnknownModel(f"The model {model[:200]!r} does not exist. There is: {names}.", param="model")


def default_model(tenant: Tenant, *, uses_knowledge: bool) -> ChatModel:
    """The tenant's model where none is named, over knowledge if asked and possible. Raises UnknownModel."""
    models = chat_models(tenant)
    if not models:
        raise UnknownModel(f"Tenant {tenant} has no chat provider with a chat model.", param="model")
    return models[-1] if uses_knowledge else models[0]
