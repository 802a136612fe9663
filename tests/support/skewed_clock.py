"""Processes whose clock differs from the database's: `python -m tests.support.skewed_clock SECONDS [--broken] COMMAND ...`.

COMMAND is one of manage.py's, or `embed PROVIDER TEXT`. The skewed clock is Python's; the database, SQLite too, reads the
machine's. With `--broken` the product uses Python's clock where it must use the database's.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from typing import Any

import django
from django.utils import timezone

_python_datetime, _python_time = datetime.datetime, time.time


def skew(seconds: float) -> None:
    """Moves this process's `timezone.now`, `datetime.now` and `time.time`."""

    class Skewed(_python_datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return _python_datetime.now(tz) + datetime.timedelta(seconds=seconds)

    # The class cannot be changed, so its name is, in Django's module and in each of the product's that imports it.
    for name, module in list(sys.modules.items()):
        is_patched = name == timezone.__name__ or name.startswith(("embeddings.", "streaming."))
        if is_patched and vars(module).get("datetime") is _python_datetime:
            vars(module)["datetime"] = Skewed
    time.time = lambda: _python_time() + seconds
    assert abs((timezone.now() - _python_datetime.now(datetime.UTC)).total_seconds() - seconds) < 1


def break_clock() -> None:
    """Puts Python's clock in the place of the database's where new leases and expiries are written."""
    from embeddings.dispatch import task_queue
    from embeddings.models import a_lease_from_now
    from embeddings.runs import transitions

    task_queue.Now = timezone.now
    transitions._a_lease_from_now = a_lease_from_now


def main() -> None:
    seconds, *words = sys.argv[1:]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    if words[0] == "--broken":
        del words[0]
        break_clock()
    if words[0] == "embed":
        from embeddings.models import Provider
        from embeddings.query.interactive import embed_texts

        skew(float(seconds))
        vectors = embed_texts(Provider.objects.get(name=words[1]), words[2:], timeout_ms=5_000)
        sys.stdout.write(f"{vectors.shape}\n")
        return
    from django.core.management import execute_from_command_line

    skew(float(seconds))
    execute_from_command_line(["manage.py", *words])


if __name__ == "__main__":
    main()
