"""`manage.py sweep`: brings repositories up to date and follows the runs to their end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from django.core.management.base import CommandParser

from embeddings import registry
from embeddings.management.base import INTERRUPTED, SluicegateCommand, add_json, positive_number
from embeddings.management.following import following
from embeddings.management.run_tables import outcome_table
from embeddings.models import TenantRun
from embeddings.reports import run_facts
from embeddings.reports.run_facts import report
from embeddings.runs import orphaned_runs, sweep
from embeddings.runs.follow import follow, patiently
from embeddings.states import RunTrigger


class Command(SluicegateCommand):
    help = (
        "Brings repositories up to date: reads and embeds the changes, and prints one outcome for each repository. "
        "Does the work itself if no worker runs. Ctrl-C cancels the runs it started; embedded rows are kept, and the "
        "next sweep continues from there. A second Ctrl-C exits immediately. Exit status: 1 if any outcome "
        "failed or was interrupted; else 3 if any was deferred, skipped or cancelled; else 0; 2 for usage or "
        "configuration; 4 if the database cannot be reached; 130 after Ctrl-C."
    )
    examples = "sweep\nsweep --tenant acme\nsweep --repository acme/docs --repository acme/app --json\nsweep --detach"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", action="append", default=[], help="all repositories of this tenant; repeatable")
        parser.add_argument(
            "--repository", action="append", default=[], metavar="TENANT/SLUG", help="this repository; repeatable"
        )
        parser.add_argument(
            "--concurrency",
            type=positive_number,
            metavar="N",
            help="repositories swept in parallel (SWEEP_CONCURRENCY)",
        )
        parser.add_argument(
            "--detach", action="store_true", help="start the runs for the workers and return immediately"
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        repositories = registry.select_repositories(options["tenant"], options["repository"])
        if not options["detach"]:
            busy = "Another run has some of these repositories: checking whether a process still works on it."
            orphaned_runs.wait_for_heartbeats(repositories, lambda: self.note(busy))
        runs = sweep.start(repositories, trigger=RunTrigger.COMMAND, concurrency=options["concurrency"])
        if options["detach"]:
            if options["json"]:
                self.print_json({"runs": [report(run) for run in runs]})
                return
            for run in runs:
                short = run_facts.short_id(run)
                self.stdout.write(
                    f"Run {short} started on provider {run.provider}: `manage.py runs show {short}` shows it."
                )
            return
        was_interrupted = self._follow(runs)
        ended, reports = patiently(lambda: _read(runs))
        if options["json"]:
            self.print_json({"runs": reports})
        else:
            self.print_table(outcome_table([outcome for one in reports for outcome in one["outcomes"]]))
            for story in filter(None, map(run_facts.circuit_story, ended)):
                self.note(story)
        status = run_facts.exit_status(outcome["status"] for one in reports for outcome in one["outcomes"])
        if was_interrupted or status:
            sys.exit(INTERRUPTED if was_interrupted else status)

    def _follow(self, runs: list[TenantRun]) -> bool:
        """Follows the runs to their end; whether Ctrl-C or a supervisor's SIGTERM cancelled them."""
        with _interruptible() as interruption, following(self.stderr) as follower:

            def look(current: list[TenantRun]) -> None:
                follower(current)
                if interruption.is_news():
                    self.note("Cancelling; embedded rows are kept. Ctrl-C again exits immediately.")
                    for run in current:
                        sweep.request_cancel(run)

            follow(runs, look)
            # The follower's threads may have outlasted the connection of this one.
            patiently(lambda: follower.look(runs))
        return interruption.came


def _read(runs: Sequence[TenantRun]) -> tuple[list[TenantRun], list[dict[str, Any]]]:
    """The runs as they ended, and their reports."""
    ended = list(run_facts.runs().filter(pk__in=[run.pk for run in runs]).order_by("pk"))
    return ended, [report(run) for run in ended]


class _Interruption:
    """Records the first signal, so that the running scan or call can be cancelled; the second one interrupts."""

    def __init__(self) -> None:
        self.came = False
        self._was_reported = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def is_news(self) -> bool:
        """True once, after the first signal."""
        is_news, self._was_reported = self.came and not self._was_reported, self.came
        return is_news


@contextmanager
def _interruptible() -> Iterator[_Interruption]:
    """Records Ctrl-C and SIGTERM while the block runs, if this is the main thread."""
    interruption = _Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
