"""The only writer of knowledge rows: versions, their rows, their vectors (docs/architecture.md, Sweep).

A version goes live, and the one it replaces goes away, in one transaction, once each of its rows has a vector or a reason.
A failing provider therefore leaves the old text searchable, never a hole. Locks: run, outcome, task, then versions in the
order of their ids; the repository last.
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
    """Where new versions belong: nothing of one tenant is ever written, read or counted for another."""

    tenant_id: int
    repository_id: int
    generation_id: int
    rules: str


@dataclass(frozen=True)
class ReadFile:
    """One file as the scan read it: its chunks, or the reason why it has none."""

    path: str
    oid: str
    chunks: Sequence[Chunk] = ()
    skipped_reason: str = ""


@dataclass(frozen=True)
class Written:
    """What a scan wrote: rows in all, and how many took a vector that the tenant already had."""

    rows: int = 0
    reused: int = 0


def text_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# --- versions -------------------------------------------------------------------------------------------------------
def write_versions(place: Place, files: Sequence[ReadFile]) -> Written:
    """Writes one new version per file with all its rows, in one transaction; complete ones go live at once.

    A row whose text this tenant has embedded in this generation takes that vector.
    """
    hashes = {chunk.text: text_hash(chunk.text) for read in files for chunk in read.chunks}
    with transaction.atomic():
        file_ids = _file_ids(place, [read.path for read in files])
        # Before the unpublished predecessors go: what was embedded of them is not bought again.
        known = known_vectors(place.tenant_id, place.generation_id, hashes.values())
        _delete_versions(
            FileVersion.objects.filter(generation=place.generation_id, is_live=False, file__in=file_ids.values())
        )
        versions = FileVersion.objects.bulk_create(_version(place, read, file_ids[read.path]) for read in files)
        rows = [
            (version.pk, chunk, hashes[chunk.text])
            for version, read in zip(versions, files, strict=True)
            for chunk in read.chunks
        ]
        _insert_rows(place, rows, known)
        _publish_complete(place.repository_id, [version.pk for version in versions])
    return Written(rows=len(rows), reused=sum(hash_ in known for _, _, hash_ in rows))


def refresh_statistics() -> None:
    """After many rows were written: PostgreSQL would otherwise plan for small tables until its own round comes."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "ANALYZE (SKIP_LOCKED) embeddings_knowledgerow, embeddings_fileversion, embeddings_sourcefile"
            )


def copy_to_generation(place: Place, version_ids: Sequence[int]) -> Written:
    """Copies live versions of another generation as pending ones of this: the model changed, the text did not."""
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
    """Files gone from the tree go at once, in every generation. Returns how many rows went."""
    gone = 0
    for start in range(0, len(file_ids), _CHUNK):
        some = file_ids[start : start + _CHUNK]
        with transaction.atomic():
            gone += _delete_versions(FileVersion.objects.filter(file__in=some))
            SourceFile.objects.filter(pk__in=some).delete()
            _touch(repository_id)
    return gone


def delete_versions(repository_id: int, version_ids: Sequence[int]) -> None:
    """Drops versions that are obsolete before they went live."""
    for start in range(0, len(version_ids), _CHUNK):
        with transaction.atomic():
            _delete_versions(FileVersion.objects.filter(pk__in=version_ids[start : start + _CHUNK], is_live=False))


def promote_generation(repository: Repository, generation_id: int) -> bool:
    """Search moves to the generation once it is complete for the repository, and the rows of older ones go.

    Until then search answers from the older generation: never from both, never from nothing.
    """
    others = FileVersion.objects.filter(file__repository=repository).exclude(generation=generation_id)
    found = list(others.values_list("pk", flat=True))
    if repository.live_generation_id == generation_id and not found:
        return False
    with transaction.atomic():
        if _is_at_work(repository) or _has_unpublished(repository, generation_id):
            return False
        _delete_versions(FileVersion.objects.filter(pk__in=found))
        # The repository last, as everywhere.
        Repository.objects.filter(pk=repository.pk).update(live_generation=generation_id)
        _touch(repository.pk)
    return True


def _is_at_work(repository: Repository) -> bool:
    """Whether a later run is at work on it, perhaps for a newer generation: that run promotes its own."""
    return RepositoryOutcome.objects.filter(repository=repository, status__in=OUTCOME_UNFINISHED).exists()


def _has_unpublished(repository: Repository, generation_id: int) -> bool:
    return FileVersion.objects.filter(file__repository=repository, generation=generation_id, is_live=False).exists()


def _file_ids(place: Place, paths: Sequence[str]) -> dict[str, int]:
    SourceFile.objects.bulk_create(
        [SourceFile(repository_id=place.repository_id, path=path) for path in paths],
        ignore_conflicts=True,
        batch_size=_CHUNK,
    )
    found: dict[str, int] = {}
    for start in range(0, len(paths), _CHUNK):
        some = SourceFile.objects.filter(repository=place.repository_id, path__in=paths[start : start + _CHUNK])
        found.update(some.values_list("path", "pk"))
    return found


def _version(place: Place, read: ReadFile, file_id: int) -> FileVersion:
    return FileVersion(
        file_id=file_id,
        generation_id=place.generation_id,
        blob_oid=read.oid,
        rules=place.rules,
        row_count=len(read.chunks),
        skipped_reason=read.skipped_reason,
    )


_INSERT_ROW = """
INSERT INTO embeddings_knowledgerow (tenant_id, repository_id, generation_id, version_id, ordinal, start_line, end_line,
  text, text_hash, vector, undeliverable_reason) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, '')"""


def _insert_rows(place: Place, rows: Sequence[tuple[int, Chunk, bytes]], known: dict[bytes, np.ndarray]) -> None:
    # By hand: making an object of each row costs four times what the database does.
    whose = (place.tenant_id, place.repository_id, place.generation_id)
    values: list[Any] = [
        (*whose, version_id, chunk.ordinal, chunk.start_line, chunk.end_line, chunk.text, hash_, known.get(hash_))
        for version_id, chunk, hash_ in rows
    ]
    _execute_with_vectors(_INSERT_ROW, values, vector_at=9)


def _publish_complete(repository_id: int, version_ids: Sequence[int]) -> bool:
    """Makes those of the versions live that have nothing pending; whether there was one.

    The caller has the versions locked, or just made them.
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
    """Rows first: they have no dependents, so that one statement takes them all. Returns how many rows went."""
    version_ids = _locked(versions)
    gone = 0
    for start in range(0, len(version_ids), _CHUNK):
        some = version_ids[start : start + _CHUNK]
        gone += KnowledgeRow.objects.filter(version__in=some).delete()[0]
        FileVersion.objects.filter(pk__in=some).delete()
    return gone


def _touch(repository_id: int) -> None:
    """What search may have cached of this repository is stale."""
    Repository.objects.filter(pk=repository_id).update(knowledge_revision=F("knowledge_revision") + 1)


# --- vectors --------------------------------------------------------------------------------------------------------
def known_vectors(tenant_id: int, generation_id: int, hashes: Iterable[bytes]) -> dict[bytes, np.ndarray]:
    """Vectors that this tenant already has for these texts in this generation."""
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
    """Gives rows their vectors and publishes the versions that this completes; inside the caller's transaction.

    Returns how many rows took one: a row that has gone, or has a vector already, takes none.
    """
    row_ids = [row_id for row_id, _ in rows]
    versions = _locked_versions(row_ids)
    taken = _update_vectors(rows)
    published = _publish_complete(repository_id, versions)
    if not published and FileVersion.objects.filter(pk__in=versions, is_live=True).exists():
        _touch(repository_id)
    return taken


def mark_undeliverable(repository_id: int, row_ids: Sequence[int], reason: str) -> None:
    """Rows whose text the provider refuses for good: listed with the reason, their version may go live without them."""
    versions = _locked_versions(row_ids)
    KnowledgeRow.objects.filter(PENDING, pk__in=row_ids).update(undeliverable_reason=reason[:500] or "refused")
    _publish_complete(repository_id, versions)


def retry_undeliverable(repository: Repository) -> int:
    """Makes the repository's undeliverable rows pending again, for the next sweep. Returns how many.

    Their versions stay live meanwhile: the next sweep embeds the rows where they stand.
    """
    rows = KnowledgeRow.objects.filter(repository=repository, vector=None).exclude(undeliverable_reason="")
    return rows.update(undeliverable_reason="", task=None)


def learn_dimensions(generation_id: int, found: int) -> None:
    """The first reply decides a generation's dimensions; raises DimensionMismatch where a later one differs."""
    known = EmbeddingGeneration.objects.values_list("dimensions", flat=True)
    settled = known.get(pk=generation_id)
    if settled is None:
        EmbeddingGeneration.objects.filter(pk=generation_id, dimensions=None).update(dimensions=found)
        settled = known.get(pk=generation_id)
    if settled != found:
        raise DimensionMismatch(f"the reply has {found} dimensions, this generation has {settled}")


def _locked_versions(row_ids: Sequence[int]) -> list[int]:
    """Locks the rows' versions in the order of their ids: two batches of one file see each other's vectors."""
    version_ids = KnowledgeRow.objects.filter(pk__in=row_ids).values("version")
    return _locked(FileVersion.objects.filter(pk__in=version_ids))


def _locked(versions: QuerySet[FileVersion]) -> list[int]:
    """Versions before their rows, whoever writes or deletes them: that is the order of locks."""
    ordered = versions.order_by("pk")
    if connection.vendor == "postgresql":
        ordered = ordered.select_for_update(no_key=True, of=("self",))
    return list(ordered.values_list("pk", flat=True))


def _update_vectors(rows: Sequence[tuple[int, np.ndarray]]) -> int:
    update = "UPDATE embeddings_knowledgerow SET vector = %s WHERE id = %s AND vector IS NULL"
    return _execute_with_vectors(update, [(vector, row_id) for row_id, vector in rows], vector_at=0)


def _execute_with_vectors(statement: str, values: list[Any], vector_at: int) -> int:
    """Runs the statement for each tuple of values, one of which is a vector or None; returns the affected rows."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            bind_in_binary(cursor)
        else:
            values = [_for_database(each, vector_at) for each in values]
        cursor.executemany(statement, values)
        return int(cursor.rowcount)


def _for_database(values: tuple[Any, ...], vector_at: int) -> tuple[Any, ...]:
    vector = values[vector_at]
    stored = None if vector is None else database_value(vector, connection)
    return (*values[:vector_at], stored, *values[vector_at + 1 :])
