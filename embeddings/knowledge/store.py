"""The only writer of knowledge rows: versions, their rows, their vectors (docs/architecture.md, Sweep).

A version goes live, and the version it replaces is deleted, in one transaction, once each of its rows has a vector or a
reason for having none. So while the provider fails, the old text stays searchable. Lock order: run, outcome, task,
versions by id, repository.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.db import connection, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet

from embeddings.errors import DimensionMismatch
from embeddings.knowledge.chunking import Chunk
from embeddings.models import EmbeddingGeneration, FileVersion, KnowledgeRow, Repository, RepositoryOutcome, SourceFile
from embeddings.states import OUTCOME_UNFINISHED
from embeddings.vectors import bind_in_binary, database_value

_CHUNK = 500
PENDING = Q(vector=None, undeliverable_reason="")


@dataclass(frozen=True)
class Place:
    """Where new versions are written: one tenant, repository and generation, and the chunking rules in force."""

    tenant_id: int
    repository_id: int
    generation_id: int
    rules: str


@dataclass(frozen=True)
class ReadFile:
    """One file that the scan has read: its chunks, or the reason why it has none."""

    path: str
    oid: str
    chunks: Sequence[Chunk] = ()
    skipped_reason: str = ""


@dataclass(frozen=True)
class Written:
    """Counts of a write: all rows, and those that reuse a vector the tenant already had."""

    rows: int = 0
    reused: int = 0


def text_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# --- versions -------------------------------------------------------------------------------------------------------
def write_versions(place: Place, files: Sequence[ReadFile]) -> Written:
    """Writes one new version per file with all its rows, in one transaction; complete versions go live at once.

    A row whose text this tenant has already embedded in this generation reuses that vector.
    """
    hashes = {chunk.text: text_hash(chunk.text) for read in files for chunk in read.chunks}
    with transaction.atomic():
        file_ids = _file_ids(place, [read.path for read in files])
        # Before the unpublished predecessors are deleted, so that their vectors are reused.
        known = known_vectors(place.tenant_id, place.generation_id, hashes.values())
        _delete_versions(
            FileVersion.objects.filter(generation=place.generation_id, is_live=False, file__in=file_ids.values())
        )
        versions = FileVersion.objects.bulk_create(
            FileVersion(
                file_id=file_ids[read.path],
                generation_id=place.generation_id,
                blob_oid=read.oid,
                rules=place.rules,
                row_count=len(read.chunks),
                skipped_reason=read.skipped_reason,
            )
            for read in files
        )
        rows = [
            (version.pk, chunk, hashes[chunk.text])
            for version, read in zip(versions, files, strict=True)
            for chunk in read.chunks
        ]
        # Raw SQL: creating a model instance per row costs four times as much as the insert itself.
        owner = (place.tenant_id, place.repository_id, place.generation_id)
        values: list[Any] = [
            (*owner, version_id, chunk.ordinal, chunk.start_line, chunk.end_line, chunk.text, hash_, known.get(hash_))
            for version_id, chunk, hash_ in rows
        ]
        _execute_with_vectors(_INSERT_ROW, values, vector_at=9)
        _publish_complete(place.repository_id, [version.pk for version in versions])
    return Written(rows=len(rows), reused=sum(hash_ in known for _, _, hash_ in rows))


def refresh_statistics() -> None:
    """Call after many writes: until autovacuum runs, PostgreSQL would plan queries as if the tables were small."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "ANALYZE (SKIP_LOCKED) embeddings_knowledgerow, embeddings_fileversion, embeddings_sourcefile"
            )


def copy_to_generation(place: Place, version_ids: Sequence[int]) -> Written:
    """Copies live versions of another generation as pending versions of this one, after a change of model."""
    sources = FileVersion.objects.filter(pk__in=version_ids).select_related("file").prefetch_related("rows")
    files = [
        ReadFile(
            path=source.file.path,
            oid=source.blob_oid,
            chunks=[
                Chunk(row.ordinal, row.start_line, row.end_line, row.text)
                for row in sorted(source.rows.all(), key=lambda row: row.ordinal)
            ],
            skipped_reason=source.skipped_reason,
        )
        for source in sources
    ]
    return write_versions(place, files)


def delete_files(repository_id: int, file_ids: Sequence[int]) -> int:
    """Deletes files that have left the tree, in every generation. Returns the number of deleted rows."""
    deleted = 0
    for start in range(0, len(file_ids), _CHUNK):
        some = file_ids[start : start + _CHUNK]
        with transaction.atomic():
            deleted += _delete_versions(FileVersion.objects.filter(file__in=some))
            SourceFile.objects.filter(pk__in=some).delete()
            _touch(repository_id)
    return deleted


def delete_versions(repository_id: int, version_ids: Sequence[int]) -> None:
    """Deletes those of the versions that are not live."""
    for start in range(0, len(version_ids), _CHUNK):
        with transaction.atomic():
            _delete_versions(FileVersion.objects.filter(pk__in=version_ids[start : start + _CHUNK], is_live=False))


def promote_generation(repository: Repository, generation_id: int) -> bool:
    """Moves search to the generation if it is complete for the repository, and deletes the rows of all others.

    Until then search uses the older generation alone. Returns whether the generation was promoted.
    """
    versions = FileVersion.objects.filter(file__repository=repository)
    others = list(versions.exclude(generation=generation_id).values_list("pk", flat=True))
    if repository.live_generation_id == generation_id and not others:
        return False
    with transaction.atomic():
        # A later run may be working on a newer generation, which it will promote itself.
        in_run = RepositoryOutcome.objects.filter(repository=repository, status__in=OUTCOME_UNFINISHED)
        if in_run.exists() or versions.filter(generation=generation_id, is_live=False).exists():
            return False
        _delete_versions(FileVersion.objects.filter(pk__in=others))
        Repository.objects.filter(pk=repository.pk).update(live_generation=generation_id)
        _touch(repository.pk)
    return True


def _file_ids(place: Place, paths: Sequence[str]) -> dict[str, int]:
    """Ids of the repository's files by path; those that do not exist are created."""
    SourceFile.objects.bulk_create(
        [SourceFile(repository_id=place.repository_id, path=path) for path in paths],
        ignore_conflicts=True,
        batch_size=_CHUNK,
    )
    ids: dict[str, int] = {}
    for start in range(0, len(paths), _CHUNK):
        some = SourceFile.objects.filter(repository=place.repository_id, path__in=paths[start : start + _CHUNK])
        ids.update(some.values_list("path", "pk"))
    return ids


_INSERT_ROW = """
INSERT INTO embeddings_knowledgerow (tenant_id, repository_id, generation_id, version_id, ordinal, start_line, end_line,
  text, text_hash, vector, undeliverable_reason) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, '')"""


def _publish_complete(repository_id: int, version_ids: Sequence[int]) -> bool:
    """Makes those of the versions live that have no pending rows; returns whether there were any.

    The caller has locked the versions, or has just created them.
    """
    pending_rows = KnowledgeRow.objects.filter(PENDING, version=OuterRef("pk"))
    ready = FileVersion.objects.filter(~Exists(pending_rows), pk__in=version_ids, is_live=False)
    complete = list(ready.filter(row_count__isnull=False).values_list("pk", "file", "generation"))
    for generation_id in {generation for _, _, generation in complete}:
        files = [file for _, file, generation in complete if generation == generation_id]
        _delete_versions(FileVersion.objects.filter(is_live=True, generation=generation_id, file__in=files))
    if complete:
        FileVersion.objects.filter(pk__in=[pk for pk, _, _ in complete]).update(is_live=True)
        _touch(repository_id)
    return bool(complete)


def _delete_versions(versions: QuerySet[FileVersion]) -> int:
    """Deletes the versions and their rows; returns the number of rows. Rows first, in one statement each chunk."""
    version_ids = _locked(versions)
    deleted = 0
    for start in range(0, len(version_ids), _CHUNK):
        some = version_ids[start : start + _CHUNK]
        deleted += KnowledgeRow.objects.filter(version__in=some).delete()[0]
        FileVersion.objects.filter(pk__in=some).delete()
    return deleted


def _touch(repository_id: int) -> None:
    """Invalidates what search has cached of the repository."""
    Repository.objects.filter(pk=repository_id).update(knowledge_revision=F("knowledge_revision") + 1)


# --- vectors --------------------------------------------------------------------------------------------------------
def known_vectors(tenant_id: int, generation_id: int, hashes: Iterable[bytes]) -> dict[bytes, np.ndarray]:
    """The vectors that this tenant already has in this generation for these text hashes."""
    wanted = list(set(hashes))
    known: dict[bytes, np.ndarray] = {}
    for start in range(0, len(wanted), _CHUNK):
        rows = KnowledgeRow.objects.filter(
            tenant=tenant_id,
            generation=generation_id,
            text_hash__in=wanted[start : start + _CHUNK],
            vector__isnull=False,
        )
        found = rows.values_list("text_hash", "vector")
        known.update((bytes(hash_), vector) for hash_, vector in found if vector is not None)
    return known


def write_vectors(repository_id: int, rows: Sequence[tuple[int, np.ndarray]]) -> int:
    """Stores the rows' vectors and publishes the versions that this completes, inside the caller's transaction.

    Returns the number of rows updated: one that was deleted, or already has a vector, is left alone.
    """
    versions = _locked_versions([row_id for row_id, _ in rows])
    update = "UPDATE embeddings_knowledgerow SET vector = %s WHERE id = %s AND vector IS NULL"
    updated = _execute_with_vectors(update, [(vector, row_id) for row_id, vector in rows], vector_at=0)
    published = _publish_complete(repository_id, versions)
    if not published and FileVersion.objects.filter(pk__in=versions, is_live=True).exists():
        _touch(repository_id)
    return updated


def mark_undeliverable(repository_id: int, row_ids: Sequence[int], reason: str) -> None:
    """Marks rows whose text the provider refuses, with its reason; their version may go live without their vectors."""
    versions = _locked_versions(row_ids)
    KnowledgeRow.objects.filter(PENDING, pk__in=row_ids).update(undeliverable_reason=reason[:500] or "refused")
    _publish_complete(repository_id, versions)


def retry_undeliverable(repository: Repository) -> int:
    """Makes the repository's undeliverable rows pending again, for the next sweep. Returns how many.

    Their versions stay live meanwhile.
    """
    rows = KnowledgeRow.objects.filter(repository=repository, vector=None).exclude(undeliverable_reason="")
    return rows.update(undeliverable_reason="", task=None)


def learn_dimensions(generation_id: int, found: int) -> None:
    """The first reply decides a generation's dimensions; raises DimensionMismatch if a later reply differs."""
    dimensions = EmbeddingGeneration.objects.values_list("dimensions", flat=True)
    expected = dimensions.get(pk=generation_id)
    if expected is None:
        EmbeddingGeneration.objects.filter(pk=generation_id, dimensions=None).update(dimensions=found)
        expected = dimensions.get(pk=generation_id)
    if expected != found:
        raise DimensionMismatch(f"the reply has {found} dimensions, this generation has {expected}")


def _locked_versions(row_ids: Sequence[int]) -> list[int]:
    """Locks the rows' versions, by id, so that two batches of one file see each other's vectors."""
    version_ids = KnowledgeRow.objects.filter(pk__in=row_ids).values("version")
    return _locked(FileVersion.objects.filter(pk__in=version_ids))


def _locked(versions: QuerySet[FileVersion]) -> list[int]:
    """Locks the versions, by id, before their rows are written or deleted; returns the ids."""
    ordered = versions.order_by("pk")
    if connection.vendor == "postgresql":
        ordered = ordered.select_for_update(no_key=True, of=("self",))
    return list(ordered.values_list("pk", flat=True))


def _execute_with_vectors(statement: str, values: list[Any], vector_at: int) -> int:
    """Runs the statement for each tuple of values, which has a vector or None at `vector_at`; returns affected rows."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            bind_in_binary(cursor)
        else:
            at = vector_at
            values = [
                each if each[at] is None else (*each[:at], database_value(each[at], connection), *each[at + 1 :])
                for each in values
            ]
        cursor.executemany(statement, values)
        return int(cursor.rowcount)
