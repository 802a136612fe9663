"""Waits before one step until the test lets it go: `python -m tests.support.broken_workers.waits_at sweep --json`, and as
the Celery application of a worker.

`WAITS_AT` names the step. `WAITS_IN` is the test's folder: the file `arrived` is made at the step, and `released` awaited.
`WITHOUT_RETRY` names a function of `task_queue` whose retry on a database error is taken out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from django.core.management import execute_from_command_line

from embeddings.dispatch import drain, reply_storage, task_queue
from embeddings.models import TenantRun
from embeddings.runs import transitions
from embeddings.states import OUTCOME_UNFINISHED
from project.celery import app
from tests.support.waiting import eventually


def _is_decided(run: TenantRun) -> bool:
    return not run.outcomes.filter(status__in=OUTCOME_UNFINISHED).exists()


def _always(*_: object, **__: object) -> bool:
    return True


# The owner of the function, its name, and the calls of it that wait.
STEPS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "admit": (drain, "_admit", _always),
    "final timeout": (drain, "_settle_failure", _always),
    "slot freed": (task_queue, "fail", _always),
    "busy reply": (task_queue, "requeue_busy", _always),
    "settle": (task_queue, "settle_and_admit", _always),
    "store": (reply_storage, "store", _always),
    "decide": (transitions, "decide", _always),
    "finish": (transitions, "finish_run", _is_decided),
}


def _wait_at(owner: Any, name: str, waits: Callable[..., bool], folder: Path) -> None:
    step = getattr(owner, name)

    @wraps(step)
    def held(*args: Any, **kwargs: Any) -> Any:
        if not (folder / "released").exists() and waits(*args, **kwargs):
            (folder / "arrived").touch()
            eventually((folder / "released").exists, timeout=120, message=f"{name} is released")
        return step(*args, **kwargs)

    setattr(owner, name, held)


if chosen := os.environ.get("WAITS_AT"):
    _wait_at(*STEPS[chosen], folder=Path(os.environ["WAITS_IN"]))
if bare := os.environ.get("WITHOUT_RETRY"):
    setattr(task_queue, bare, getattr(task_queue, bare).__wrapped__)

if __name__ == "__main__":
    execute_from_command_line(["manage.py", *sys.argv[1:]])

__all__ = ["app"]
