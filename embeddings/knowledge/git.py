"""Running git: its environment, its deadline, and the errors of a source (docs/architecture.md, Sweep)."""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar, cast

_CONFIGURATION = Path(__file__).with_name("gitconfig")
_PASSED_ON = (
    "PATH",
    "HOME",
    "TMPDIR",
    "SSH_AUTH_SOCK",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
)
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=3"
# With `gitconfig`, all the configuration that git gets.
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": str(_CONFIGURATION),
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "SSH_ASKPASS": "true",
    "SSH_ASKPASS_REQUIRE": "never",
    "GIT_SSH_COMMAND": _SSH,
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "LC_ALL": "C",
}
_MAX_OUTPUT_BYTES = 1 << 29
_MAX_ERROR_BYTES = 8_192
_MAX_MESSAGE = 400
_POLL_SECONDS = 0.1
_READ_BYTES = 1 << 16


class SourceError(Exception):
    """The source of a repository could not be read."""

    code: ClassVar[str] = "KB_SOURCE_ERROR"


class SourceRefused(SourceError):
    """The source or ref is not allowed to reach git."""

    code = "KB_SOURCE_REFUSED"


class SourceUnreachable(SourceError):
    """The source could not be fetched. What it contains is unknown: unreachable is not empty."""

    code = "KB_SOURCE_UNREACHABLE"


class SourceTimeout(SourceError):
    """Git did not finish before the wall deadline and was killed."""

    code = "KB_SOURCE_TIMEOUT"


class SourceStopped(SourceError):
    """The caller asked to stop."""

    code = "KB_SOURCE_STOPPED"


class RevisionMissing(SourceError):
    """The source was reached and has no such branch, tag or commit."""

    code = "KB_SOURCE_REVISION_MISSING"


class SourceEmpty(RevisionMissing):
    """The source was reached and has no commit at all."""

    code = "KB_SOURCE_EMPTY"


class GitFailed(Exception):
    """A git process ended with a status other than zero; `message` is bounded and scrubbed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Git:
    """Git processes that share one wall deadline.

    Each process inherits the descriptors in `inherit` (a lock that must outlive a killed parent).
    """

    def __init__(self, deadline_seconds: float, should_stop: Callable[[], bool] | None = None) -> None:
        self._ends_at = time.monotonic() + deadline_seconds
        self._should_stop = should_stop
        self.inherit: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises SourceStopped if the caller asked to stop, SourceTimeout if the deadline has passed."""
        if self._should_stop is not None and self._should_stop():
            raise SourceStopped("stopped on request")
        if time.monotonic() >= self._ends_at:
            raise SourceTimeout("git did not finish before the deadline")

    def run(self, *arguments: str) -> bytes:
        """Standard output of `git <arguments>`. Raises GitFailed, SourceTimeout, SourceStopped, SourceUnreachable."""
        process = start(arguments, stdin=subprocess.DEVNULL, inherit=self.inherit)
        try:
            output, errors = self._collect(process)
            status = None
            while status is None:
                try:
                    status = process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    self.check()
        finally:
            end(process)
        if status:
            raise GitFailed(scrub(errors))
        return output

    def _collect(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        output, errors = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(cast(IO[bytes], process.stdout), selectors.EVENT_READ, output)
            selector.register(cast(IO[bytes], process.stderr), selectors.EVENT_READ, errors)
            while selector.get_map():
                self.check()
                for key, _ in selector.select(_POLL_SECONDS):
                    piece = os.read(key.fd, _READ_BYTES)
                    if not piece:
                        selector.unregister(key.fileobj)
                    key.data.extend(piece)
                if len(output) > _MAX_OUTPUT_BYTES:
                    raise GitFailed("git's output is too large")
                del errors[:-_MAX_ERROR_BYTES]
        return bytes(output), bytes(errors)


def start(
    arguments: Sequence[str], *, stdin: int, inherit: tuple[int, ...] = (), stderr: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Starts git as the leader of a process group, with no configuration but ours. Raises SourceUnreachable."""
    try:
        return subprocess.Popen(
            ["git", *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ} | _ENVIRONMENT,
            start_new_session=True,
            pass_fds=inherit,
        )
    except OSError as error:
        raise SourceUnreachable(f"git cannot be started: {error.strerror}") from error


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the process's group, reaps it and closes its pipes."""
    # Once it is reaped, its id may belong to another process.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        # Closing flushes what the dead process never read.
        with suppress(BrokenPipeError):
            pipe.close()


def scrub(errors: bytes) -> str:
    """The end of git's error output as one bounded line without credentials, home paths or control characters."""
    text = errors.decode("utf-8", "replace")
    text = re.sub(r"://[^/\s@]*@", "://", text)
    home = os.environ.get("HOME", "")
    if len(home) > 1:
        text = text.replace(home, "~")
    text = re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text).strip()
    return text[-_MAX_MESSAGE:] or "git failed without an error message"
