"""Search over one tenant's knowledge base: exact, and scoped to the tenant in the query itself.

Each repository is searched in its live generation, with the query embedded by that generation's model. After a model
change the old generation is searched until the new one is complete; vectors of two models are never compared.
"""

from __future__ import annotations

from collections.abc import Callable
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

# Row ids and cosine similarities, best first.
Ranked = list[tuple[int, float]]


@dataclass(frozen=True)
class SearchHit:
    """A chunk that was found: its place (lines from 1, inclusive), its text, and its cosine similarity (-1 to 1)."""

    repository: str
    path: str
    start_line: int
    end_line: int
    score: float
    text: str


def search(
    tenant: Tenant, query: str, limit: int = 5, *, is_cancelled: Callable[[], bool] = lambda: False
) -> list[SearchHit]:
    """The tenant's nearest rows, best first.

    Raises UsageError for an empty or oversized query or a limit out of range, and what `interactive.embed_texts` raises.
    """
    if not query.strip():
        raise UsageError("the query is empty: say what to look for")
    if len(query) > QUERY_CHARACTERS_MAX:
        raise UsageError(f"the query is over {QUERY_CHARACTERS_MAX} characters")
    if not 1 <= limit <= LIMIT_MAX:
        raise UsageError(f"the limit must be between 1 and {LIMIT_MAX}, not {limit}")
    nearest = _nearest_in_database if connection.vendor == "postgresql" else vector_cache.nearest
    searched = Repository.objects.filter(tenant=tenant, removed_at=None).exclude(live_generation=None)
    generations = EmbeddingGeneration.objects.filter(
        pk__in=searched.values("live_generation"), dimensions__isnull=False
    )
    ranked = []
    for generation in list(generations.select_related("provider").order_by("-pk")):
        vectors = interactive.embed_texts(
            generation.provider, [query], generation=generation, is_cancelled=is_cancelled
        )
        ranked.append(nearest(tenant.pk, generation.pk, vectors[0], limit))
    # Lists of several models are merged by rank, because similarities of two models do not compare.
    longest = max(map(len, ranked), default=0)
    merged = [one[place] for place in range(longest) for one in ranked if place < len(one)]
    return _hits(tenant, merged[:limit])


def _nearest_in_database(tenant_id: int, generation_id: int, query: np.ndarray, limit: int) -> Ranked:
    """What `vector_cache.nearest` returns, computed by pgvector."""
    distance = Func(
        "vector",
        Value(query, output_field=VectorField()),
        template="((%(expressions)s))",
        arg_joiner=" <=> ",
        output_field=FloatField(),
    )
    rows = (
        vector_cache.searchable(tenant_id, generation_id)
        .annotate(distance=distance)
        .order_by("distance", "pk")
        .values_list("pk", "distance")
    )
    # The distance of a zero vector is NaN.
    return [(row_id, 1.0 - distance) for row_id, distance in rows[:limit] if distance == distance]


def _hits(tenant: Tenant, ranked: Ranked) -> list[SearchHit]:
    rows = KnowledgeRow.objects.filter(tenant=tenant, pk__in=[row_id for row_id, _ in ranked])
    by_id = rows.select_related("repository", "version__file").in_bulk()
    return [
        SearchHit(
            repository=row.repository.slug,
            path=row.version.file.path,
            start_line=row.start_line,
            end_line=row.end_line,
            score=round(float(score), 4),
            text=row.text,
        )
        for row_id, score in ranked
        # A row may have been deleted since it was ranked.
        if (row := by_id.get(row_id)) is not None
    ]
