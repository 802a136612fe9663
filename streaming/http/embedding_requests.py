"""`POST /v1/embeddings`: a tenant's texts through its embedding provider, as interactive tasks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embeddings.models import Tenant
from embeddings.query.interactive import embed_texts
from streaming.http.requests import EmbeddingRequest
from streaming.refusals import InvalidRequest, UnknownModel


@dataclass(frozen=True)
class Embedded:
    """`vectors` is float32[texts, dimensions], little-endian."""

    model: str
    vectors: npt.NDArray[np.float32]


def embedded(tenant: Tenant, body: EmbeddingRequest) -> Embedded:
    """The vectors of the texts, in order. Raises UnknownModel, InvalidRequest, and the provider's errors."""
    provider = tenant.embedding_provider
    if provider is None or body.model != provider.embedding_model:
        raise UnknownModel(f"The model {body.model[:200]!r} does not exist.", param="model")
    if any(not text.strip() for text in body.texts):
        raise InvalidRequest("A text is blank.", param="input")
    size = provider.batch_size
    batches = [body.texts[at : at + size] for at in range(0, len(body.texts), size)]
    vectors = np.concatenate([embed_texts(provider, batch) for batch in batches])
    if body.dimensions not in (None, vectors.shape[1]):
        raise InvalidRequest(f"This model has {vectors.shape[1]} dimensions.", param="dimensions")
    return Embedded(body.model, vectors.astype("<f4"))
