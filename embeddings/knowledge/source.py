"""A git source for the sweep: a snapshot of its tree, and the content of chosen blobs (docs/architecture.md, Sweep)."""

import enum
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
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

    Only this class writes to `directory`, which may be deleted at any time: a partial or broken mirror is created
    again. `<directory>.lock` keeps two processes from fetching into it at once.
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
        """The tree that the ref names now. Transfers nothing if the mirror already has it.

        Raises SourceUnreachable, SourceTimeout, SourceStopped, RevisionMissing and SourceEmpty.
        """
        git = Git(self._deadline_seconds, self._should_stop)
        if is_local(self._source) and not os.path.isdir(self._source):
            raise SourceUnreachable("there is no such directory")
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(_lock_path(self._directory)) as descriptor:
            while not try_lock(descriptor):
                git.check()
                time.sleep(_LOCK_POLL_SECONDS)
            # Git holds the lock too, so that the lock outlives a killed parent until its git has ended.
            git.inherit = (descriptor,)
            advertised = self._resolve(git)
            # A broken mirror is treated like one without the commit: both are fetched again.
            with suppress(GitFailed):
                if (self._directory / "HEAD").is_file() and self._fetched(git) == advertised.commit:
                    return self._snapshot(git, advertised.commit)
            return self._transfer(git, advertised)

    def read(self, oids: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """The content of these blobs, in their order, one in memory at a time.

        Raises SourceUnreachable if the mirror has lost one; the mirror is then deleted, and the next fetch creates it
        again.
        """
        arguments = ("-C", str(self._directory), "cat-file", "--batch")
        if not self._directory.is_dir():
            raise SourceUnreachable("the mirror is gone; the next fetch creates it again")
        process = start(arguments, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            for oid in oids:
                if self._should_stop is not None and self._should_stop():
                    raise SourceStopped("stopped on request")
                yield oid, self._read_blob(process, oid)
        finally:
            end(process)

    def _resolve(self, git: Git) -> "_Advertised":
        """The ref as the source advertises it; nothing is fetched."""
        # Full names that the ref may stand for, in order of preference; a branch comes before a tag of the same name.
        if not self._ref or is_commit_id(self._ref):
            names = ["HEAD"]
        elif self._ref == "HEAD" or self._ref.startswith("refs/"):
            names = [self._ref, f"{self._ref}^{{}}"]
        else:
            names = [f"refs/heads/{self._ref}", f"refs/tags/{self._ref}", f"refs/tags/{self._ref}^{{}}"]
        refs = self._advertised(git, *names)
        if is_commit_id(self._ref):
            return _Advertised(self._ref, self._ref)
        for name in names:
            if name in refs and not name.endswith("^{}"):
                return _Advertised(name, refs.get(f"{name}^{{}}", refs[name]))
        if not self._advertised(git):
            raise SourceEmpty("the source has no commit yet")
        missing = f"no branch, tag or commit {self._ref!r}" if self._ref else "no commit on its default branch"
        raise RevisionMissing(f"the source has {missing}")

    def _advertised(self, git: Git, *names: str) -> dict[str, str]:
        """The commits of these refs at the source, or of all its refs, by full name."""
        try:
            listing = git.run("ls-remote", "--quiet", "--", self._source, *names)
        except GitFailed as error:
            raise SourceUnreachable(error.message) from None
        return dict(line.split("\t", 1)[::-1] for line in listing.decode("utf-8", "replace").splitlines())

    def _transfer(self, git: Git, advertised: "_Advertised") -> Snapshot:
        """Fetches into the mirror and, if that fails, into a new one: the source was just reached, so the mirror is bad.

        The ref may move between `ls-remote` and the fetch; the commit that was fetched counts.
        """
        try:
            self._fetch(git, advertised, "--depth=1", f"+{advertised.name}:{_HEAD}")
            return self._snapshot(git, self._fetched(git))
        except GitFailed:
            # Resolved again, so that a connection that broke in between does not cost the mirror.
            advertised = self._resolve(git)
        _discard(self._directory)
        by_id = is_commit_id(advertised.name)
        refspecs = [f"+{advertised.name}:{_HEAD}"]
        if by_id:
            # Some servers serve no commit by its id: fetch every branch and tag instead.
            refspecs = ["+refs/heads/*:refs/sluicegate/heads/*", "+refs/tags/*:refs/sluicegate/tags/*"]
        try:
            # Without --depth, which some servers do not support.
            self._fetch(git, advertised, "--update-shallow", *refspecs)
        except GitFailed as error:
            raise SourceUnreachable(error.message) from None
        try:
            if by_id:
                git.run("-C", str(self._directory), "update-ref", _HEAD, f"{advertised.name}^{{commit}}")
            return self._snapshot(git, self._fetched(git))
        except GitFailed:
            raise RevisionMissing(f"the source has no commit {self._ref!r}") from None

    def _fetch(self, git: Git, advertised: "_Advertised", depth: str, *refspecs: str) -> None:
        """Fetches into the mirror; creates it if there is none, and cleans up after killed processes if there is one."""
        if (self._directory / "HEAD").is_file():
            # A lock file would block every later fetch, and partial packs would stay for ever.
            for pattern in ("*.lock", "tmp_*"):
                for leftover in list(self._directory.rglob(pattern)):
                    _discard(leftover)
        else:
            scratch = self._directory.with_name(f"{self._directory.name}.new")
            for partial in (scratch, self._directory):
                _discard(partial)
            object_format = "sha256" if len(advertised.commit) == 64 else "sha1"
            git.run("init", "--quiet", "--bare", "--template=", f"--object-format={object_format}", "--", str(scratch))
            scratch.rename(self._directory)
        flags = ("--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", depth)
        git.run("-C", str(self._directory), "fetch", *flags, "--", self._source, *refspecs)

    def _fetched(self, git: Git) -> str:
        arguments = ("-C", str(self._directory), "rev-parse", "--verify", "--quiet", "--end-of-options")
        return git.run(*arguments, f"{_HEAD}^{{commit}}").decode("ascii").strip()

    def _snapshot(self, git: Git, commit: str) -> Snapshot:
        listing = git.run("-C", str(self._directory), "ls-tree", "-r", "-z", "-l", "--full-tree", commit)
        entries: dict[str, TreeEntry] = {}
        for record in filter(None, listing.split(b"\0")):
            facts, _, name = record.partition(b"\t")
            mode, _type, oid, size = facts.split()
            kind: Kind = "submodule" if mode == b"160000" else "symlink" if mode == b"120000" else "file"
            # Bytes that are not UTF-8 are shown as \xNN: the same every time, and storable in any database. If two names
            # become equal that way, the first in git's order is kept.
            path = name.decode("utf-8", "backslashreplace")
            entries.setdefault(path, TreeEntry(path, oid.decode("ascii"), 0 if size == b"-" else int(size), kind))
        return Snapshot(commit, tuple(entries.values()))

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
        raise SourceUnreachable(f"the mirror has no readable blob {oid}; the next fetch creates the mirror again")


def remove_mirror(directory: Path) -> bool:
    """Removes the mirror of a removed repository, with its lock file; False if a fetch still holds the lock."""
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
    """A full ref name, or a commit id, and the commit it stands for."""

    name: str
    commit: str


def decode(content: bytes, max_bytes: int) -> str | Skip:
    """The text of a blob, without its byte order mark, or the reason why it has no text.

    Decodes UTF-8, and UTF-16 with a byte order mark; no encoding is guessed.
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
    """Whether a path matches some `include` pattern (no patterns: every path does) and no `exclude` pattern.

    Patterns have gitignore syntax: `*.py` at any depth, `/setup.py` at the root, `docs/` a whole directory, `src/**`.
    """
    if include and not _compiled(tuple(include)).match_file(path):
        return False
    return not (exclude and _compiled(tuple(exclude)).match_file(path))


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines(patterns)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
