"""`manage.py runs`: lists, shows and cancels runs."""

from __future__ import annotations

from typing import Any

from embeddings.management.base import NounCommand, Options, add_json, positive_number
from embeddings.management.run_tables import outcome_table, run_table
from embeddings.reports import run_facts
from embeddings.reports.facts import moment
from embeddings.reports.run_facts import report
from embeddings.runs import sweep
from embeddings.states import RUN_UNFINISHED, RunStatus


class Command(NounCommand):
    help = "Lists, shows and cancels runs."
    examples = "runs list\nruns show 1f0c9a27\nruns cancel 1f0c9a27"

    def add_actions(self, actions: Any) -> None:
        listing = self.add_action(
            actions, "list", self._list, "Lists the newest runs.", "runs list --status degraded --limit 5"
        )
        listing.add_argument("--status", choices=RunStatus.values, help="only runs with this status")
        listing.add_argument("--provider", help="only runs on this provider")
        listing.add_argument("--limit", type=positive_number, default=20, metavar="N", help="how many (20)")
        show = self.add_action(actions, "show", self._show, "Shows a run's circuit and outcomes.", "runs show 1f0c9a27")
        cancel = self.add_action(
            actions,
            "cancel",
            self._cancel,
            "Cancels the unfinished part of a run; embedded rows are kept.",
            "runs cancel 1f0c9a27\nruns cancel 1f0c9a27 --repository acme/docs",
        )
        cancel.add_argument("--repository", metavar="TENANT/SLUG", help="only this repository's part of the run")
        for parser in (show, cancel):
            parser.add_argument("run", help="the run's id, or its beginning")
        for parser in (listing, show):
            add_json(parser)

    def _list(self, options: Options) -> None:
        found = run_facts.runs()
        if options["status"]:
            found = found.filter(status=options["status"])
        if options["provider"]:
            found = found.filter(provider__name=options["provider"])
        runs = list(found[: options["limit"]])
        if options["json"]:
            self.print_json({"runs": [run_facts.run_facts(run) for run in runs]})
        else:
            self.print_table(run_table(runs))

    def _show(self, options: Options) -> None:
        run = run_facts.find_run(options["run"])
        shown = report(run)
        if options["json"]:
            self.print_json(shown)
            return
        seconds = run_facts.seconds_of(run)
        took = "" if seconds is None else f", {seconds} s"
        self.stdout.write(
            f"Run {run.public_id} on provider {run.provider}: {run.status}, circuit {run.circuit.state}, "
            f"by {run.trigger} at {moment(run.created_at)}{took}"
        )
        if story := run_facts.circuit_story(run):
            self.stdout.write(story)
        self.print_table(outcome_table(shown["outcomes"]))

    def _cancel(self, options: Options) -> None:
        run = run_facts.find_run(options["run"])
        if run.status not in RUN_UNFINISHED:
            self.stdout.write(f"Run {run_facts.short_id(run)} is {run.status} already; nothing to cancel.")
        elif options["repository"]:
            sweep.cancel_outcome(run_facts.find_outcome(run, options["repository"]))
            self.stdout.write(f"{options['repository']} is cancelled in run {run_facts.short_id(run)}.")
        else:
            sweep.request_cancel(run)
            self.stdout.write(f"Run {run_facts.short_id(run)} is cancelled; embedded rows are kept.")
