"""Validation of sources and refs before git sees them (docs/architecture.md, Sweep). Refusals never repeat a secret."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from embeddings.knowledge.git import SourceRefused

_MAX_LENGTH = 1_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SCP_LIKE = re.compile(r"(?:(?P<user>[^@/:]*)@)?(?P<host>[^@/:]+):(?P<path>[^:].*)")
_REF_FORBIDDEN = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|^[-/.]|\.lock(/|$)|[./]$|^@$")
_FULL_OID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def validate_source(source: str, source_roots: Sequence[Path] | None) -> str:
    """Returns the source as git will get it: an https or ssh URL, `user@host:path`, or an absolute local path.

    `file://` URLs and relative paths become absolute paths. Local paths must lie under one of `source_roots`
    after every link is followed; None allows them anywhere, an empty sequence nowhere. Does not check that the
    source can be reached. Raises SourceRefused with one line for the person who typed it.
    """
    source = source.strip()
    if not source or len(source) > _MAX_LENGTH:
        raise SourceRefused(f"a source has 1 to {_MAX_LENGTH} characters")
    if _CONTROL.search(source):
        raise SourceRefused("a source has no control characters or line breaks")
    if source.startswith("-"):
        raise SourceRefused("a source does not start with '-'")
    if "://" in source:
        return _validate_url(source, source_roots)
    if match := _SCP_LIKE.fullmatch(source):
        user, host, path = match["user"], match["host"], match["path"]
        # Git would read "name:password@host:path" as a path on the host "name".
        if (user is None and "@" in path) or (user is not None and not _USER.fullmatch(user)):
            raise SourceRefused("an ssh source carries a plain user name and no password")
        if not _HOST.fullmatch(host) or path.startswith("-"):
            raise SourceRefused("an ssh source names a host and a path")
        return source
    if "::" in source.split("/")[0]:
        raise SourceRefused("git's remote helpers ('name::address') are not allowed")
    return _validate_path(source, source_roots)


def validate_ref(ref: str) -> str:
    """Returns a branch, a tag, a full `refs/...` name or a full commit id; empty for the source's default branch.

    Raises SourceRefused.
    """
    ref = ref.strip()
    if ref and (len(ref) > _MAX_LENGTH or _CONTROL.search(ref) or _REF_FORBIDDEN.search(ref)):
        raise SourceRefused("a ref is a branch, a tag or a full commit id")
    if _FULL_OID.fullmatch(ref.lower()):
        return ref.lower()
    return ref


def is_commit_id(ref: str) -> bool:
    """Whether a validated ref names a commit by its full id."""
    return _FULL_OID.fullmatch(ref) is not None


def is_local(source: str) -> bool:
    """Whether a validated source is a path on this machine."""
    return source.startswith("/")


def _validate_url(source: str, source_roots: Sequence[Path] | None) -> str:
    try:
        url = urlsplit(source)
        host, _ = url.hostname or "", url.port
    except ValueError:
        raise SourceRefused("the URL cannot be read") from None
    if url.scheme == "file":
        if host not in ("", "localhost"):
            raise SourceRefused("a file URL names no host")
        return _validate_path(unquote(url.path), source_roots)
    if url.scheme not in ("https", "ssh"):
        raise SourceRefused("a source is an https or ssh URL, or a local path")
    if "@" in url.netloc and url.scheme == "https":
        raise SourceRefused("a source URL carries no user name, password or token")
    if "@" in url.netloc and (url.password is not None or not _USER.fullmatch(url.username or "")):
        raise SourceRefused("an ssh source carries a plain user name and no password")
    if url.query or url.fragment or "?" in source or "#" in source:
        raise SourceRefused("a source URL has no query and no fragment")
    if not _HOST.fullmatch(host) or url.path in ("", "/"):
        raise SourceRefused("a source URL names a host and a path")
    return source


def _validate_path(path: str, source_roots: Sequence[Path] | None) -> str:
    if _CONTROL.search(path):
        raise SourceRefused("a source has no control characters or line breaks")
    absolute = Path(os.path.abspath(path))
    if source_roots is not None:
        for place in (absolute, _git_directory(absolute)):
            # realpath, because Path.resolve raises on a loop of links, which must be refused instead.
            real = Path(os.path.realpath(place))
            if not any(real.is_relative_to(os.path.realpath(root)) for root in source_roots):
                raise SourceRefused("a local source must lie under one of SOURCE_ROOTS")
    return str(absolute)


def _git_directory(worktree: Path) -> Path:
    """The directory git would read; a `.git` file can point outside the roots just as a link can."""
    dot_git = worktree / ".git"
    if not dot_git.is_file():
        return dot_git if dot_git.exists() else worktree
    try:
        pointer = os.fsdecode(dot_git.read_bytes()[:4096])
    except OSError:
        raise SourceRefused("the repository's .git file cannot be read") from None
    return worktree / pointer.removeprefix("gitdir:").strip()
