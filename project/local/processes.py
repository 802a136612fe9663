"""Child processes that end with their parent's block, for `make demo` and `make up` (leaf, no Django)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
# Local runs ignore these variables, which the shell may hold for another deployment.
_DEPLOYMENT = ("DATABASE_URL", "REDIS_URL", "SECRET_KEY", "SOURCE_ROOTS", "DJANGO_SETTINGS_MODULE")


def local_environment(var_dir: Path) -> dict[str, str]:
    """This environment with `var_dir` as VAR_DIR, this interpreter's programs first, and no outside servers."""
    kept = {name: value for name, value in os.environ.items() if name not in _DEPLOYMENT}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PATH": programs, "VAR_DIR": str(var_dir), "PYTHONUNBUFFERED": "1"}


def say(line: str, *, bold: bool = False) -> None:
    """Print a line immediately, in bold on a terminal."""
    is_bold = bold and sys.stdout.isatty()
    sys.stdout.write(f"\x1b[1m{line}\x1b[0m\n" if is_bold else f"{line}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def background(command: Sequence[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` during the block, with its output in `log`; then end it and its children."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A terminal's Ctrl-C must reach only the parent, which then ends its children in order.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process, whole_group=True)


def foreground(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `command` at the terminal, Ctrl-C included, and return its exit status once it has ended."""
    process = subprocess.Popen(command, cwd=CHECKOUT, env=environ)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal signals the child too: let it shut down by itself.
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_STOP_TIMEOUT_S)
        raise
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], *, whole_group: bool = False) -> None:
    """Send SIGTERM, after 10 s SIGKILL, and reap the process. Does nothing if it has ended."""
    if process.poll() is None:
        _send(process, signal.SIGTERM, whole_group=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
    if process.poll() is None or whole_group:
        _send(process, signal.SIGKILL, whole_group=whole_group)
    process.wait()


def within(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether `holds` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1 at `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _send(process: subprocess.Popen[bytes], number: signal.Signals, *, whole_group: bool) -> None:
    # The group has ended already.
    with contextlib.suppress(ProcessLookupError):
        if whole_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
