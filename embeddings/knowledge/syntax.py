"""Asks parser processes, which may die, where to cut a text (docs/architecture.md, Sweep)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, cast

from embeddings.knowledge import grammars

_MAX_CHARACTERS = 4_000_000
# The kernel's CPU limit ends a parser that is busy; the deadline of a question ends one that is stopped. It is far longer,
# so that a text loses no syntax only because the machine is loaded.
_PATIENCE_S = 20.0
_WALL_SECONDS_PER_CPU_SECOND = 4
# More parsers than cores would only compete for them.
_MAX_PROCESSES = max(2, os.cpu_count() or 2)


def cuts(path: str, text: str, capacity: int) -> list[int]:
    """Offsets (in characters) at which syntax divides the text into parts of at most `capacity` characters.

    Empty if there is no answer: the text used up its CPU time, its parser did not answer in time, its lines are longer than
    `capacity` on average (minified code), or no process could be started.
    """
    if len(text) > _MAX_CHARACTERS or text.count("\n") * capacity < len(text):
        return []
    with _turns:
        try:
            process = _idle_process() or _Process()
        except OSError:
            return []
        offsets = process.ask(grammars.grammar_of(path), text, capacity)
        if offsets is None:
            process.close()
        else:
            _idle.append(process)
    return offsets or []


def _idle_process() -> _Process | None:
    """An idle process that is still alive, or None; a process that was killed while idle must cost no text its cuts."""
    with contextlib.suppress(IndexError):
        while True:
            process = _idle.pop()
            if process.is_alive():
                return process
            process.close()
    return None


class _Process:
    """One parser process. It ends when its input closes, so it cannot outlive its parent."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(grammars.__file__))],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._requests = cast(IO[bytes], self._process.stdin).fileno()
        self._answers = cast(IO[bytes], self._process.stdout).fileno()
        os.set_blocking(self._requests, False)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: str, text: str, capacity: int) -> list[int] | None:
        """The offsets, or None if the process died or its time passed while it parsed this text."""
        body = text.encode("utf-8")
        header = json.dumps({"grammar": grammar, "capacity": capacity, "bytes": len(body)})
        deadline = time.monotonic() + _PATIENCE_S + _WALL_SECONDS_PER_CPU_SECOND * grammars.cpu_limit_s(len(body))
        unsent, answer = memoryview(header.encode() + b"\n" + body), b""
        try:
            while unsent:
                _wait(self._requests, select.POLLOUT, deadline)
                unsent = unsent[os.write(self._requests, unsent) :]
            while not answer.endswith(b"\n"):
                _wait(self._answers, select.POLLIN, deadline)
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return None
                answer += part
        except (BrokenPipeError, TimeoutError):
            return None
        offsets: list[int] = json.loads(answer)
        return offsets

    def close(self) -> None:
        """Kills and reaps the process."""
        self._process.kill()
        self._process.communicate()


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Returns when the descriptor is ready or its other end is closed; raises TimeoutError at the deadline."""
    # Not select(): it refuses descriptors above 1023.
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


_turns = threading.BoundedSemaphore(_MAX_PROCESSES)
_idle: list[_Process] = []


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()
