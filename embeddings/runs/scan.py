"""Scanning one repository: what its tree says against what the rows hold; only changed blobs are read.

Resume needs no cursor. A scan that is broken off leaves whole versions behind; the next one finds what is missing.
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

# PostgreSQL's index over paths takes no entry over a third of its page.
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
    """What a scan found: the revision, whether anything differed, and what was written."""

    revision: str
    skipped: Counter[str] = field(default_factory=Counter)
    changed: bool = False
    written: int = 0
    reused: int = 0
    deleted: int = 0


class ScanStopped(Exception):
    """The scan was told to stop; what it wrote stands."""


def scan(repository: Repository, generation: EmbeddingGeneration, controls: ScanControls) -> ScanResult:
    """Brings the repository's versions up to its source's tree; raises SourceError, or ScanStopped."""
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
    """The rules that versions are cut under; a version cut under others is cut anew."""
    return f"{provider.chunk_characters}/{provider.chunk_tokens}/{settings.FILE_BYTES_MAX}"


@dataclass
class _Kept:
    """What the rows hold of one path: its version in this generation, pending or live, and its live one in an older."""

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
        wanted = {entry.path: entry for entry in self._wanted(snapshot)}
        kept = self._kept()
        self._drop_obsolete(wanted, kept)
        self._copy_older(wanted, kept)
        self._read_changed(
            [entry for path, entry in wanted.items() if _needs_reading(entry, kept.get(path), self.place)]
        )
        # After what is new was read: a file that was renamed takes the vectors of its old name.
        self._drop_gone([each.file_id for path, each in kept.items() if path not in wanted])
        if self.result.written >= _MANY_ROWS:
            store.refresh_statistics()
        return self.result

    def _wanted(self, snapshot: Snapshot) -> Iterator[TreeEntry]:
        for entry in snapshot.entries:
            if not matches(entry.path, self.repository.include, self.repository.exclude):
                continue
            reason = _skip_by_tree(entry)
            if reason is None:
                yield entry
            else:
                self.result.skipped[reason] += 1

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

    def _drop_gone(self, file_ids: Sequence[int]) -> None:
        self._check()
        if file_ids:
            self.result.changed = True
            self.result.deleted += store.delete_files(self.repository.pk, file_ids)

    def _drop_obsolete(self, wanted: dict[str, TreeEntry], kept: dict[str, _Kept]) -> None:
        """A pending version whose live predecessor is what the tree says again: the change was taken back."""
        obsolete = [
            each.pending.pk
            for path, each in kept.items()
            if path in wanted and each.pending is not None and _is_current(each.live, wanted[path], self.place)
        ]
        if obsolete:
            self.result.changed = True
            store.delete_versions(self.repository.pk, obsolete)

    def _copy_older(self, wanted: dict[str, TreeEntry], kept: dict[str, _Kept]) -> None:
        """After a model change: files whose text did not change are copied as pending, without reading a blob."""
        same = []
        for path, entry in wanted.items():
            each = kept.get(path)
            if (
                each
                and each.older
                and not each.live
                and not each.pending
                and _is_current(each.older, entry, self.place)
            ):
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
        """The files, cut, in order. Some are cut while those before them are written: the parsers are other processes."""
        paths: dict[str, list[str]] = {}
        for entry in entries:
            paths.setdefault(entry.oid, []).append(entry.path)
        ahead: deque[Future[ReadFile]] = deque()
        with ThreadPoolExecutor(_READERS, thread_name_prefix="sluicegate-scan") as readers:
            for oid, content in self.mirror.read(list(paths)) if paths else ():
                for path in paths[oid]:
                    ahead.append(readers.submit(self._read, path, oid, content))
                while len(ahead) > _FILES_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _read(self, path: str, oid: str, content: bytes) -> ReadFile:
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


def _skip_by_tree(entry: TreeEntry) -> str | None:
    """What the tree alone says: such a file is never read."""
    if entry.kind == "symlink":
        return Skip.SYMLINK.value
    if entry.kind == "submodule":
        return Skip.SUBMODULE.value
    if len(entry.path.encode()) > PATH_BYTES_MAX:
        return PATH_TOO_LONG
    return Skip.TOO_LARGE.value if entry.size > settings.FILE_BYTES_MAX else None


def _is_current(version: FileVersion | None, entry: TreeEntry, place: Place) -> bool:
    """Whether the version is this content, cut under these rules, with all its rows."""
    return (
        version is not None
        and version.blob_oid == entry.oid
        and version.rules == place.rules
        and version.row_count is not None
    )


def _needs_reading(entry: TreeEntry, kept: _Kept | None, place: Place) -> bool:
    if kept is None:
        return True
    if _is_current(kept.live, entry, place):
        return False
    return not _is_current(kept.pending, entry, place)
