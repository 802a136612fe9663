"""The progress of a followed sweep: one bar per repository on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from django.core.management.base import OutputWrapper
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from embeddings.management.rendering import console, printable
from embeddings.models import TenantRun
from embeddings.reports.run_facts import Progress, progress

_BETWEEN_LOOKS_S = 0.5
_BETWEEN_LINES_S = 10.0


class Display(Protocol):
    """Shows the progress of the repositories."""

    def show(self, repositories: Sequence[Progress]) -> None: ...


@contextmanager
def following(stream: OutputWrapper) -> Iterator[Follower]:
    """A callback for `sweep.follow` that shows progress on `stream`."""
    if not stream.isatty():
        yield Follower(Lines(stream))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Bars(*columns, TimeElapsedColumn(), console=console(stream)) as bars:
        yield Follower(Rows(bars))


class Follower:
    """Reads the rows at most every half second; `look` reads them immediately."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._looked = 0.0

    def __call__(self, runs: list[TenantRun]) -> None:
        if time.monotonic() - self._looked < _BETWEEN_LOOKS_S:
            return
        self.look(runs)

    def look(self, runs: Sequence[TenantRun]) -> None:
        self._display.show(progress(runs))
        self._looked = time.monotonic()


class Rows:
    """Shows one bar per repository, on a terminal."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._rows: dict[str, TaskID] = {}

    def show(self, repositories: Sequence[Progress]) -> None:
        for one in repositories:
            if one.name not in self._rows:
                self._rows[one.name] = self._bars.add_task(one.name, total=None, status=one.status)
            total = max(one.total, 1) if one.finished else one.total or None
            completed = total if one.finished and one.total == 0 else one.embedded
            self._bars.update(self._rows[one.name], total=total, completed=completed or 0, status=_words(one))


class Lines:
    """Prints a line at each change of status and, every ten seconds, the number of embedded rows."""

    def __init__(self, stream: OutputWrapper) -> None:
        self._stream = stream
        self._printed: dict[str, tuple[str, float]] = {}

    def show(self, repositories: Sequence[Progress]) -> None:
        now = time.monotonic()
        for one in repositories:
            status, when = self._printed.get(one.name, ("", 0.0))
            is_due = one.status == "embedding" and now - when >= _BETWEEN_LINES_S
            if one.status == status and not is_due:
                continue
            rows = f" {one.embedded}/{one.total} rows" if one.total else ""
            self._stream.write(printable(f"{one.name}: {_words(one)}{rows}"), lambda line: line)
            self._printed[one.name] = (one.status, now)


def _words(one: Progress) -> str:
    return f"{one.status} ({one.error_code})" if one.error_code else one.status
