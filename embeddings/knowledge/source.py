"""A git source as the sweep sees it: a snapshot of its tree, and the bytes of chosen blobs (docs/architecture.md, Sweep)."""

import enum
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Literal, cast

from pathspec import GitIgnoreSpec

from embeddings.knowledge.address import is_commit_id, is_local, validate_ref, validate_source
from embeddings.knowledge.git import (
    Git,
    GitFailed,
    RevisionMissing,
    SourceEmpty,
    SourceError,
    SourceRefused,
    SourceStopped,
    SourceTimeout,
    SourceUnreachable,
    end,
    start,
)
from project.runtime.file_lock import lock_file, try_lock

__all__ = [
    "GitMirror",
    "RevisionMissing",
    "Skip",
    "Snapshot",
    "SourceEmpty",
    "SourceError",
    "SourceRefused",
    "SourceStopped",
    "SourceTimeout",
    "SourceUnreachable",
    "TreeEntry",
    "decode",
    "matches",
    "validate_ref",
    "validate_source",
]

Kind = Literal["file", "symlink", "submodule"]

_HEAD = "refs/sluicegate/head"
_LOCK_POLL_SECONDS = 0.02
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Skip(enum.Enum):
    """Why a file has no rows."""

    BINARY = "binary"
    NOT_DECODABLE = "not_decodable"
    TOO_LARGE = "too_large"
    NUL = "nul"
    LFS_POINTER = "lfs_pointer"
    SYMLINK = "symlink"
    SUBMODULE = "submodule"


@dataclass(frozen=True)
class TreeEntry:
    """One path of a snapshot; `size` is in bytes (0 for a submodule)."""

    path: str
    oid: str
    size: int
    kind: Kind


@dataclass(frozen=True)
class Snapshot:
    """The tree of one commit, in git's order; `revision` is the full commit id."""

    revision: str
    entries: tuple[TreeEntry, ...]


class GitMirror:
    """A bare mirror of one revision of one source.

    `directory` is the mirror's own and can be lost at any time: whatever is half-made or broken in it is made anew.
    `<directory>.lock` beside it keeps two processes from fetching into it at once.
    """

    def __init__(
        self,
        directory: Path,
        source: str,
        ref: str = "",
        *,
        source_roots: Sequence[Path] | None,
        deadline_seconds: float = 600.0,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._directory = directory
        self._source = validate_source(source, source_roots)
        self._ref = validate_ref(ref)
        self._deadline_seconds = deadline_seconds
        self._should_stop = should_stop

    def fetch(self) -> Snapshot:
        """The tree that the ref names now. Costs no transfer where the mirror has it already.

        Raises SourceUnreachable, SourceTimeout, SourceStopped, RevisionMissing and SourceEmpty.
        """
        git = Git(self._deadline_seconds, self._should_stop)
        if is_local(self._source) and not os.path.isdir(self._source):
            raise SourceUnreachable("there is no such directory")
        with self._locked(git):
            advertised = self._resolve(git)
            snapshot = self._stored(git, advertised.commit)
            if snapshot is not None:
                return snapshot
            return self._transfer(git, advertised)

    def read(self, oids: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """The content of these blobs, in their order, one in memory at a time.

        Raises SourceUnreachable where the mirror has lost one; the mirror is then dropped and the next fetch heals it.
        """
        arguments = ("-C", str(self._directory), "cat-file", "--batch")
        if not self._directory.is_dir():
            raise SourceUnreachable("the mirror is gone; it is made anew by the next fetch")
        process = start(arguments, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            for oid in oids:
                if self._should_stop is not None and self._should_stop():
                    raise SourceStopped("stopped on request")
                yield oid, self._read_blob(process, oid)
        finally:
            end(process)

    def _resolve(self, git: Git) -> "_Advertised":
        """What the ref names at the source, asked without fetching anything."""
        names = _candidates(self._ref)
        try:
            listing = git.run("ls-remote", "--quiet", "--", self._source, *names)
        except GitFailed as error:
            raise SourceUnreachable(error.message) from None
        refs = dict(line.split("\t", 1)[::-1] for line in listing.decode("utf-8", "replace").splitlines())
        if is_commit_id(self._ref):
            return _Advertised(self._ref, self._ref)
        for name in names:
            if name in refs and not name.endswith("^{}"):
                return _Advertised(name, refs.get(f"{name}^{{}}", refs[name]))
        raise self._missing(git)

    def _missing(self, git: Git) -> RevisionMissing:
        try:
            listing = git.run("ls-remote", "--quiet", "--", self._source)
        except GitFailed as error:
            raise SourceUnreachable(error.message) from None
        if not listing.strip():
            return SourceEmpty("the source has no commit yet")
        wanted = f"no branch, tag or commit {self._ref!r}" if self._ref else "no commit on its default branch"
        return RevisionMissing(f"the source has {wanted}")

    def _stored(self, git: Git, commit: str) -> Snapshot | None:
        """The snapshot of a commit that an earlier fetch finished, or None."""
        if not (self._directory / "HEAD").is_file():
            return None
        try:
            return self._snapshot(git, commit) if self._fetched(git) == commit else None
        except GitFailed:
            # A broken mirror is not told from one without the commit: both are fetched again.
            return None

    def _transfer(self, git: Git, advertised: "_Advertised") -> Snapshot:
        """Fetch, once into what is there and once from nothing: the source was just reached, so the fault is here."""
        try:
            self._fetch(git, advertised, "--depth=1", f"+{advertised.name}:{_HEAD}")
            return self._current(git)
        except GitFailed:
            # Asked again, so that a line that broke in between does not cost the mirror.
            advertised = self._resolve(git)
        _discard(self._directory)
        try:
            # Without --depth for servers that cannot, and all branches for those that give no commit by its id.
            self._fetch(git, advertised, "--update-shallow", *_everything(advertised))
        except GitFailed as error:
            raise SourceUnreachable(error.message) from None
        return self._adopted(git, advertised)

    def _fetch(self, git: Git, advertised: "_Advertised", depth: str, *refspecs: str) -> None:
        self._prepare(git, len(advertised.commit))
        flags = ("--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", depth)
        git.run("-C", str(self._directory), "fetch", *flags, "--", self._source, *refspecs)

    def _current(self, git: Git) -> Snapshot:
        # The ref may have moved since it was asked: what was fetched counts.
        return self._snapshot(git, self._fetched(git))

    def _adopted(self, git: Git, advertised: "_Advertised") -> Snapshot:
        try:
            if is_commit_id(advertised.name):
                git.run("-C", str(self._directory), "update-ref", _HEAD, f"{advertised.name}^{{commit}}")
            return self._current(git)
        except GitFailed:
            raise RevisionMissing(f"the source has no commit {self._ref!r}") from None

    def _prepare(self, git: Git, oid_length: int) -> None:
        """An empty mirror where there is none; in an old one, nothing left of processes that were killed."""
        if (self._directory / "HEAD").is_file():
            _remove_leftovers(self._directory)
            return
        scratch = self._directory.with_name(f"{self._directory.name}.new")
        for half_made in (scratch, self._directory):
            _discard(half_made)
        object_format = "sha256" if oid_length == 64 else "sha1"
        git.run("init", "--quiet", "--bare", "--template=", f"--object-format={object_format}", "--", str(scratch))
        scratch.rename(self._directory)

    def _fetched(self, git: Git) -> str:
        arguments = ("-C", str(self._directory), "rev-parse", "--verify", "--quiet", "--end-of-options")
        return git.run(*arguments, f"{_HEAD}^{{commit}}").decode("ascii").strip()

    def _snapshot(self, git: Git, commit: str) -> Snapshot:
        listing = git.run("-C", str(self._directory), "ls-tree", "-r", "-z", "-l", "--full-tree", commit)
        return Snapshot(commit, tuple(_entries(listing).values()))

    def _read_blob(self, process: subprocess.Popen[bytes], oid: str) -> bytes:
        requests, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        try:
            requests.write(f"{oid}\n".encode())
            requests.flush()
            header = answers.readline().split()
            if len(header) == 3 and header[1] == b"blob":
                content = answers.read(int(header[2]) + 1)
                if len(content) == int(header[2]) + 1:
                    return content[:-1]
        except BrokenPipeError:
            pass
        _discard(self._directory)
        raise SourceUnreachable(f"the mirror has no readable blob {oid}; it is made anew by the next fetch")

    @contextmanager
    def _locked(self, git: Git) -> Iterator[None]:
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(_lock_path(self._directory)) as descriptor:
            while not try_lock(descriptor):
                git.check()
                time.sleep(_LOCK_POLL_SECONDS)
            # Held by git itself too, so that a git whose parent was killed is waited for.
            git.inherit = (descriptor,)
            yield


def remove_mirror(directory: Path) -> bool:
    """Removes the mirror of a source that nobody will fetch again, its lock too; False while a fetch still holds it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = _lock_path(directory)
    with lock_file(path) as descriptor:
        if not try_lock(descriptor):
            return False
        _discard(directory)
        path.unlink(missing_ok=True)
    return True


def _lock_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


@dataclass(frozen=True)
class _Advertised:
    name: str
    commit: str


def decode(content: bytes, max_bytes: int) -> str | Skip:
    """The text of a blob, without its byte order mark, or the reason why it has none.

    UTF-8, and UTF-16 that says so by its mark; nothing is guessed.
    """
    if len(content) > max_bytes:
        return Skip.TOO_LARGE
    if content.startswith(_LFS_POINTER):
        return Skip.LFS_POINTER
    encoding = "utf-16" if content.startswith(_UTF16_MARKS) else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        return Skip.BINARY if b"\0" in content else Skip.NOT_DECODABLE
    return Skip.NUL if "\0" in text else text


def matches(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a path is wanted: under some `include` pattern (none given: all are) and under no `exclude` pattern.

    Patterns are gitignore's: `*.py` at any depth, `/setup.py` at the root, `docs/` a whole directory, `src/**`.
    """
    if include and not _compiled(tuple(include)).match_file(path):
        return False
    return not (exclude and _compiled(tuple(exclude)).match_file(path))


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines(patterns)


def _everything(advertised: "_Advertised") -> tuple[str, ...]:
    if is_commit_id(advertised.name):
        return ("+refs/heads/*:refs/sluicegate/heads/*", "+refs/tags/*:refs/sluicegate/tags/*")
    return (f"+{advertised.name}:{_HEAD}",)


def _candidates(ref: str) -> tuple[str, ...]:
    """Full names that a ref may stand for, the preferred one first; a branch comes before a tag of its name."""
    if not ref or is_commit_id(ref):
        return ("HEAD",)
    if ref == "HEAD" or ref.startswith("refs/"):
        return (ref, f"{ref}^{{}}")
    return (f"refs/heads/{ref}", f"refs/tags/{ref}", f"refs/tags/{ref}^{{}}")


def _remove_leftovers(directory: Path) -> None:
    # A lock file would refuse every later fetch, and each half-fetched pack would stay for good.
    for pattern in ("*.lock", "tmp_*"):
        for leftover in list(directory.rglob(pattern)):
            _discard(leftover)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _entries(listing: bytes) -> dict[str, TreeEntry]:
    """Entries by path; should an escaped name (see `_path`) equal another file's, the first in git's order stays."""
    entries: dict[str, TreeEntry] = {}
    for record in listing.split(b"\0"):
        if not record:
            continue
        facts, _, path = record.partition(b"\t")
        mode, _type, oid, size = facts.split()
        kind: Kind = "submodule" if mode == b"160000" else "symlink" if mode == b"120000" else "file"
        entry = TreeEntry(_path(path), oid.decode("ascii"), 0 if size == b"-" else int(size), kind)
        entries.setdefault(entry.path, entry)
    return entries


def _path(path: bytes) -> str:
    # A name that is not UTF-8 is shown with its odd bytes as \xNN: always the same, and fit for any database.
    return path.decode("utf-8", "backslashreplace")
