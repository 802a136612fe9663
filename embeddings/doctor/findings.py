"""Checks and their findings. Checks run at the same time, each bounded in time and isolated from the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from django.db import connections

BOUND_S = 3.0


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` tells how to mend it: a sentence, or the command to type."""

    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """One check and its time limit. `look` may yield several findings or none."""

    name: str
    look: Callable[[], Iterable[Finding]]
    bound_s: float = BOUND_S


def check(name: str, *, bound_s: float = BOUND_S) -> Callable[[Callable[[], Iterable[Finding]]], Check]:
    """Decorator: makes the function a Check."""
    return lambda look: Check(name, look, bound_s)


def ok(name: str, detail: str, advice: str = "") -> Finding:
    return Finding(name, Status.OK, detail, advice)


def warning(name: str, detail: str, advice: str = "") -> Finding:
    return Finding(name, Status.WARNING, detail, advice)


def error(name: str, detail: str, advice: str = "") -> Finding:
    return Finding(name, Status.ERROR, detail, advice)


def examine(checks: Sequence[Check]) -> list[Finding]:
    """The findings, in the order of the checks. A check that raises or exceeds its limit becomes an error."""
    examinations = [_Examination(check) for check in checks]
    return [finding for examination in examinations for finding in examination.findings()]


class _Examination:
    """Runs one check in its own thread: a hanging driver cannot be interrupted, so its thread is abandoned."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._found: list[Finding] = []
        self._deadline = time.monotonic() + check.bound_s
        self._thread = threading.Thread(target=self._look, name=f"doctor-{check.name}", daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            return [error(self._check.name, f"no answer within {self._check.bound_s:g} s")]
        return self._found

    def _look(self) -> None:
        try:
            self._found = list(self._check.look())
        except Exception as raised:  # One broken check must not hide the findings of the others.
            self._found = [error(self._check.name, f"could not be looked at: {type(raised).__name__}")]
        finally:
            connections.close_all()
