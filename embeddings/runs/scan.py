"""Scans one repository: compares its tree with the rows, and reads only changed blobs (docs/architecture.md, Sweep).

Resume needs no cursor: an interrupted scan leaves whole versions behind, and the next one finds what is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings
from django.db.models import Q

from embeddings.knowledge import chunking, store
from embeddings.knowledge.source import GitMirror, Skip, Snapshot, TreeEntry, decode, matches
from embeddings.knowledge.store import Place, ReadFile
from embeddings.models import EmbeddingGeneration, FileVersion, Provider, Repository

# PostgreSQL's index over paths takes no entry larger than a third of a page.
PATH_BYTES_MAX = 2_000
PATH_TOO_LONG = "path_too_long"
_BATCH_FILES = 100
_BATCH_CHUNKS = 1_000
_FILES_AHEAD = 32
_READERS = 2
_MANY_ROWS = 1_000


@dataclass(frozen=True)
class ScanControls:
    """`should_stop` ends the scan between batches: a lost lease, a cancel, a shutdown."""

    should_stop: Callable[[], bool]


@dataclass
class ScanResult:
    """The result of a scan: the revision, whether anything changed, rows written, rows that reused a vector, rows deleted."""

    revision: str
    skipped: Counter[str] = field(default_factory=Counter)
    changed: bool = False
    written: int = 0
    reused: int = 0
    deleted: int = 0


class ScanStopped(Exception):
    """The scan was asked to stop; the versions that it wrote stay."""


def scan(repository: Repository, generation: EmbeddingGeneration, controls: ScanControls) -> ScanResult:
    """Brings the repository's versions up to date with its source. Raises SourceError or ScanStopped."""
    mirror = GitMirror(
        mirror_directory(repository),
        repository.source,
        repository.ref,
        source_roots=settings.SOURCE_ROOTS,
        deadline_seconds=settings.SOURCE_DEADLINE_MS / 1000,
        should_stop=controls.should_stop,
    )
    return _Scan(repository, generation, controls, mirror).run(mirror.fetch())


def mirror_directory(repository: Repository) -> Path:
    return Path(settings.VAR_DIR) / "mirrors" / f"{repository.pk}.git"


def rules_of(provider: Provider) -> str:
    """The rules under which versions are cut; a version cut under others is cut again."""
    return f"{provider.chunk_characters}/{provider.chunk_tokens}/{settings.FILE_BYTES_MAX}"


@dataclass
class _Kept:
    """The versions of one path: in this generation the pending and the live one, and the live one of an older generation."""

    file_id: int
    live: FileVersion | None = None
    pending: FileVersion | None = None
    older: FileVersion | None = None


class _Scan:
    def __init__(
        self, repository: Repository, generation: EmbeddingGeneration, controls: ScanControls, mirror: GitMirror
    ) -> None:
        provider = generation.provider
        self.repository = repository
        self.generation = generation
        self.controls = controls
        self.mirror = mirror
        self.limits = chunking.ChunkLimits(provider.chunk_characters, provider.chunk_tokens)
        self.place = Place(repository.tenant_id, repository.pk, generation.pk, rules_of(provider))

    def run(self, snapshot: Snapshot) -> ScanResult:
        self.result = ScanResult(snapshot.revision)
        Repository.objects.filter(pk=self.repository.pk, live_generation=None).update(live_generation=self.generation)
        wanted = self._wanted(snapshot)
        kept = self._kept()
        self._drop_obsolete(wanted, kept)
        self._copy_older(wanted, kept)
        changed = [
            entry
            for path, entry in wanted.items()
            if path not in kept or not _has_current(kept[path], entry, self.place)
        ]
        self._read_changed(changed)
        self._check()
        # After the changed files: a renamed file takes the vectors of its old name.
        if gone := [each.file_id for path, each in kept.items() if path not in wanted]:
            self.result.changed = True
            self.result.deleted += store.delete_files(self.repository.pk, gone)
        if self.result.written >= _MANY_ROWS:
            store.refresh_statistics()
        return self.result

    def _wanted(self, snapshot: Snapshot) -> dict[str, TreeEntry]:
        """The entries to index, by path; those that the tree alone rules out are counted as skipped, and never read."""
        wanted = {}
        for entry in snapshot.entries:
            if not matches(entry.path, self.repository.include, self.repository.exclude):
                continue
            if entry.kind == "symlink":
                self.result.skipped[Skip.SYMLINK.value] += 1
            elif entry.kind == "submodule":
                self.result.skipped[Skip.SUBMODULE.value] += 1
            elif len(entry.path.encode()) > PATH_BYTES_MAX:
                self.result.skipped[PATH_TOO_LONG] += 1
            elif entry.size > settings.FILE_BYTES_MAX:
                self.result.skipped[Skip.TOO_LARGE.value] += 1
            else:
                wanted[entry.path] = entry
        return wanted

    def _kept(self) -> dict[str, _Kept]:
        current = Q(generation=self.generation.pk)
        versions = FileVersion.objects.filter(current | Q(is_live=True), file__repository=self.repository.pk)
        kept: dict[str, _Kept] = {}
        for version in versions.select_related("file").order_by("pk"):
            each = kept.setdefault(version.file.path, _Kept(version.file_id))
            if version.generation_id != self.generation.pk:
                each.older = version
            elif version.is_live:
                each.live = version
            else:
                each.pending = version
        return kept

    def _drop_obsolete(self, wanted: dict[str, TreeEntry], kept: dict[str, _Kept]) -> None:
        """Drops pending versions whose live predecessor is current again: the change was reverted."""
        obsolete = [
            each.pending.pk
            for path, each in kept.items()
            if path in wanted and each.pending is not None and _is_current(each.live, wanted[path], self.place)
        ]
        if obsolete:
            self.result.changed = True
            store.delete_versions(self.repository.pk, obsolete)

    def _copy_older(self, wanted: dict[str, TreeEntry], kept: dict[str, _Kept]) -> None:
        """After a model change, copies unchanged files of the older generation as pending, without reading a blob."""
        same = []
        for path, entry in wanted.items():
            each = kept.get(path)
            if each is None or each.older is None or each.live or each.pending:
                continue
            if _is_current(each.older, entry, self.place):
                same.append(each.older.pk)
                each.pending = each.older
        for start in range(0, len(same), _BATCH_FILES):
            self._check()
            self._count(store.copy_to_generation(self.place, same[start : start + _BATCH_FILES]))

    def _read_changed(self, entries: Sequence[TreeEntry]) -> None:
        batch: list[ReadFile] = []
        chunks = 0
        for read in self._files(entries):
            batch.append(read)
            chunks += len(read.chunks)
            if len(batch) >= _BATCH_FILES or chunks >= _BATCH_CHUNKS:
                self._write(batch)
                batch, chunks = [], 0
        self._write(batch)

    def _files(self, entries: Sequence[TreeEntry]) -> Iterator[ReadFile]:
        """The files, cut, in order; some are cut ahead while others are written, as the parsers are processes of their own."""
        paths: dict[str, list[str]] = {}
        for entry in entries:
            paths.setdefault(entry.oid, []).append(entry.path)
        ahead: deque[Future[ReadFile]] = deque()
        with ThreadPoolExecutor(_READERS, thread_name_prefix="sluicegate-scan") as readers:
            for oid, content in self.mirror.read(list(paths)) if paths else ():
                for path in paths[oid]:
                    ahead.append(readers.submit(self._cut, path, oid, content))
                while len(ahead) > _FILES_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _cut(self, path: str, oid: str, content: bytes) -> ReadFile:
        text = decode(content, settings.FILE_BYTES_MAX)
        if isinstance(text, Skip):
            return ReadFile(path, oid, skipped_reason=text.value)
        return ReadFile(path, oid, chunking.chunk(path, text, self.limits))

    def _write(self, batch: Sequence[ReadFile]) -> None:
        self._check()
        if batch:
            self._count(store.write_versions(self.place, batch))

    def _count(self, written: store.Written) -> None:
        self.result.changed = True
        self.result.reused += written.reused
        self.result.written += written.rows

    def _check(self) -> None:
        if self.controls.should_stop():
            raise ScanStopped


def _is_current(version: FileVersion | None, entry: TreeEntry, place: Place) -> bool:
    """Whether the version has this content, was cut under these rules, and has all its rows."""
    return (
        version is not None
        and version.blob_oid == entry.oid
        and version.rules == place.rules
        and version.row_count is not None
    )


def _has_current(kept: _Kept, entry: TreeEntry, place: Place) -> bool:
    return _is_current(kept.live, entry, place) or _is_current(kept.pending, entry, place)
