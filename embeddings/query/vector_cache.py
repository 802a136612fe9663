"""Exact vector search in memory, for databases without one: a cache of each tenant's vectors, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from django.conf import settings
from django.db.models import F, QuerySet

from embeddings.models import KnowledgeRow, Repository

Key = tuple[int, int]
Revisions = tuple[tuple[int, int], ...]


def searchable(tenant_id: int, generation_id: int) -> QuerySet[KnowledgeRow]:
    """The rows a search may return: the tenant's own, live, of repositories whose live generation is this one."""
    return KnowledgeRow.objects.filter(
        tenant=tenant_id,
        generation=generation_id,
        vector__isnull=False,
        version__is_live=True,
        repository__tenant=tenant_id,
        repository__removed_at=None,
        repository__live_generation=F("generation"),
    )


def nearest(tenant_id: int, generation_id: int, query: np.ndarray, limit: int) -> list[tuple[int, float]]:
    """The nearest row ids and their cosine similarities, best first."""
    matrix = _matrix(tenant_id, generation_id)
    if not len(matrix.row_ids):
        return []
    norm = float(np.linalg.norm(query)) or 1.0
    scores = matrix.vectors @ (query / norm)
    count = min(limit, len(scores))
    best = np.argpartition(-scores, count - 1)[:count]
    best = best[np.lexsort((matrix.row_ids[best], -scores[best]))]
    return [(int(matrix.row_ids[place]), float(scores[place])) for place in best]


@dataclass(frozen=True)
class _Matrix:
    """`row_ids` int64[n] and unit `vectors` float32[n, dimensions], as of the repositories' revisions."""

    revisions: Revisions
    row_ids: np.ndarray
    vectors: np.ndarray

    @property
    def size(self) -> int:
        return int(self.vectors.nbytes + self.row_ids.nbytes)


_lock = threading.Lock()
_cache: OrderedDict[Key, _Matrix] = OrderedDict()


def _matrix(tenant_id: int, generation_id: int) -> _Matrix:
    """The cached matrix if it is of the repositories' present revisions; otherwise it is read and cached (LRU)."""
    key = (tenant_id, generation_id)
    # Read before the rows: a matrix that is newer than its revisions is read once more, an older one never served.
    repositories = Repository.objects.filter(tenant=tenant_id, removed_at=None, live_generation=generation_id)
    revisions = tuple(repositories.order_by("pk").values_list("pk", "knowledge_revision"))
    with _lock:
        cached = _cache.get(key)
        if cached is not None and cached.revisions == revisions:
            _cache.move_to_end(key)
            return cached
    rows = list(searchable(tenant_id, generation_id).values_list("pk", "vector"))
    vectors = np.stack([vector for _, vector in rows if vector is not None]) if rows else np.empty((0, 0), np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    matrix = _Matrix(
        revisions,
        np.array([row_id for row_id, _ in rows], dtype=np.int64),
        np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0),
    )
    with _lock:
        _cache.pop(key, None)
        if matrix.size <= settings.SEARCH_CACHE_BYTES:
            _cache[key] = matrix
        while sum(each.size for each in _cache.values()) > settings.SEARCH_CACHE_BYTES:
            _cache.popitem(last=False)
    return matrix
