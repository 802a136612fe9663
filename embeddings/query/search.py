"""Search over one tenant's knowledge base: exact, and scoped to the tenant in the query itself.

Each repository answers from its live generation, and a query is embedded with that generation's model: after a model
change the older one answers until the newer is complete, and vectors of two models are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from django.db import connection
from django.db.models import FloatField, Func, Value

from embeddings.errors import UsageError
from embeddings.models import EmbeddingGeneration, KnowledgeRow, Repository, Tenant
from embeddings.query import interactive, vector_cache
from embeddings.vectors import VectorField

LIMIT_MAX = 100
QUERY_CHARACTERS_MAX = 8_000


@dataclass(frozen=True)
class SearchHit:
    """One answer: where it stands (lines from 1, inclusive), its text, and its cosine similarity (-1 to 1)."""

    repository: str
    path: str
    start_line: int
    end_line: int
    score: float
    text: str


def search(
    tenant: Tenant, query: str, limit: int = 5, *, is_cancelled: Callable[[], bool] = lambda: False
) -> list[SearchHit]:
    """The tenant's nearest rows, best first. Raises UsageError for an empty or oversized query or a limit out of range,
    and what `interactive.embed_texts` raises.
    """
    if not query.strip():
        raise UsageError("the query is empty: say what to look for")
    if len(query) > QUERY_CHARACTERS_MAX:
        raise UsageError(f"the query is over {QUERY_CHARACTERS_MAX} characters")
    if not 1 <= limit <= LIMIT_MAX:
        raise UsageError(f"the limit must be between 1 and {LIMIT_MAX}, not {limit}")
    ranked = [
        _rank(tenant, generation, _embed(generation, query, is_cancelled), limit)
        for generation in _live_generations(tenant)
    ]
    return _hits(tenant, _interleaved(ranked)[:limit])


def _live_generations(tenant: Tenant) -> list[EmbeddingGeneration]:
    """The generations that the tenant's repositories answer from, newest first."""
    live = Repository.objects.filter(tenant=tenant, removed_at=None).exclude(live_generation=None)
    return list(
        EmbeddingGeneration.objects.filter(pk__in=live.values("live_generation"), dimensions__isnull=False)
        .select_related("provider")
        .order_by("-pk")
    )


def _embed(generation: EmbeddingGeneration, query: str, is_cancelled: Callable[[], bool]) -> np.ndarray:
    vectors: np.ndarray = interactive.embed_texts(
        generation.provider, [query], generation=generation, is_cancelled=is_cancelled
    )
    first: np.ndarray = vectors[0]
    return first


Ranked = list[tuple[int, float]]


def _rank(tenant: Tenant, generation: EmbeddingGeneration, query: np.ndarray, limit: int) -> Ranked:
    """The generation's nearest row ids with their cosine similarities, best first."""
    if connection.vendor == "postgresql":
        return _rank_in_database(tenant, generation, query, limit)
    return vector_cache.nearest(tenant.pk, generation.pk, query, limit)


def _rank_in_database(tenant: Tenant, generation: EmbeddingGeneration, query: np.ndarray, limit: int) -> Ranked:
    distance = Func(
        "vector",
        Value(query, output_field=VectorField()),
        template="((%(expressions)s))",
        arg_joiner=" <=> ",
        output_field=FloatField(),
    )
    rows = (
        vector_cache.searchable(tenant.pk, generation.pk)
        .annotate(distance=distance)
        .order_by("distance", "pk")
        .values_list("pk", "distance")
    )
    return [(row_id, 1.0 - distance) for row_id, distance in rows[:limit] if distance == distance]


def _interleaved(ranked: Sequence[Ranked]) -> Ranked:
    """One list from several models' lists: by rank, since their scores do not compare."""
    if len(ranked) == 1:
        return ranked[0]
    longest = max((len(one) for one in ranked), default=0)
    return [one[place] for place in range(longest) for one in ranked if place < len(one)]


def _hits(tenant: Tenant, ranked: Ranked) -> list[SearchHit]:
    rows = KnowledgeRow.objects.filter(tenant=tenant, pk__in=[row_id for row_id, _ in ranked])
    found = {row.pk: row for row in rows.select_related("repository", "version__file")}
    return [_hit(found[row_id], score) for row_id, score in ranked if row_id in found]


def _hit(row: KnowledgeRow, score: float) -> SearchHit:
    return SearchHit(
        repository=row.repository.slug,
        path=row.version.file.path,
        start_line=row.start_line,
        end_line=row.end_line,
        score=round(float(score), 4),
        text=row.text,
    )
