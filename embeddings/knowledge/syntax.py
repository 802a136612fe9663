"""Asks parser processes, which may die, where to cut a text (docs/architecture.md, Sweep)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, cast

from embeddings.knowledge import grammars

_MAX_CHARACTERS = 4_000_000
# More parsers than cores would only compete for them.
_MAX_PROCESSES = max(2, os.cpu_count() or 2)


def cuts(path: str, text: str, capacity: int) -> list[int]:
    """Offsets (in characters) at which syntax divides the text into parts of at most `capacity` characters.

    Empty if there is no answer: the text used up its CPU time, its lines are longer than `capacity` on average
    (minified code), or no process could be started.
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
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: str, text: str, capacity: int) -> list[int] | None:
        """The offsets, or None if the process died while it parsed this text."""
        requests, answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        body = text.encode("utf-8")
        header = json.dumps({"grammar": grammar, "capacity": capacity, "bytes": len(body)})
        try:
            requests.write(header.encode() + b"\n" + body)
            requests.flush()
            answer = answers.readline()
        except BrokenPipeError:
            return None
        return json.loads(answer) if answer.endswith(b"\n") else None

    def close(self) -> None:
        """Kills and reaps the process."""
        self._process.kill()
        self._process.communicate()


_turns = threading.BoundedSemaphore(_MAX_PROCESSES)
_idle: list[_Process] = []


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()
