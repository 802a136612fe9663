"""Which models a tenant may chat with: its provider's chat model, plain or over its knowledge base."""

from __future__ import annotations

from dataclasses import dataclass

from embeddings.models import Provider, Tenant
from streaming.refusals import UnknownModel

KNOWLEDGE_SUFFIX = "+knowledge"


@dataclass(frozen=True)
class Offer:
    """A model under the name that the client uses, and how it is answered."""

    model: str
    provider: Provider
    uses_knowledge: bool


def offers(tenant: Tenant) -> list[Offer]:
    """Every chat model of the tenant. Over knowledge only where something embeds its questions."""
    provider = tenant.chat_provider
    if provider is None or not provider.chat_model:
        return []
    plain = Offer(provider.chat_model, provider, uses_knowledge=False)
    if tenant.embedding_provider is None:
        return [plain]
    return [plain, Offer(provider.chat_model + KNOWLEDGE_SUFFIX, provider, uses_knowledge=True)]


def choose(tenant: Tenant, model: str) -> Offer:
    """The offer of this name. Raises UnknownModel, which says what there is."""
    there = offers(tenant)
    for offer in there:
        if offer.model == model:
            return offer
    names = ", ".join(offer.model for offer in there) or "none, because the tenant has no chat provider"
    raise UnknownModel(f"The model {model[:200]!r} does not exist. There is: {names}.", param="model")


def default_offer(tenant: Tenant, *, uses_knowledge: bool) -> Offer:
    """The tenant's model where none is named, over knowledge if asked and possible. Raises UnknownModel."""
    there = offers(tenant)
    if not there:
        raise UnknownModel(f"Tenant {tenant} has no chat provider with a chat model.", param="model")
    return there[-1] if uses_knowledge else there[0]
