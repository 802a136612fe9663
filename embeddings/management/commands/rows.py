"""`manage.py rows`: the rows whose texts the provider refuses."""

from __future__ import annotations

from typing import Any

from embeddings import registry
from embeddings.knowledge import store
from embeddings.management.base import NounCommand, Options, add_json, positive_number
from embeddings.management.rendering import Table
from embeddings.reports import run_facts

_TEXT_SHOWN = 60


class Command(NounCommand):
    help = "Lists the rows that the provider refuses, and makes them pending again."
    examples = "rows undeliverable --tenant acme\nrows retry --repository acme/docs"

    def add_actions(self, actions: Any) -> None:
        undeliverable = self.add_action(
            actions,
            "undeliverable",
            self._undeliverable,
            "Lists the rows whose text the provider refuses, with its reason.",
            "rows undeliverable --tenant acme --json",
        )
        undeliverable.add_argument("--limit", type=positive_number, default=100, metavar="N", help="how many (100)")
        add_json(undeliverable)
        retry = self.add_action(
            actions,
            "retry",
            self._retry,
            "Makes undeliverable rows pending again, for the next sweep.",
            "rows retry --repository acme/docs",
        )
        for parser in (undeliverable, retry):
            parser.add_argument("--tenant", action="append", default=[], help="only this tenant's rows; repeatable")
            parser.add_argument(
                "--repository",
                action="append",
                default=[],
                metavar="TENANT/SLUG",
                help="only this repository's rows; repeatable",
            )

    def _undeliverable(self, options: Options) -> None:
        chosen = registry.match_repositories(options["tenant"], options["repository"])
        rows = list(run_facts.undeliverable_rows(chosen)[: options["limit"]])
        if options["json"]:
            self.print_json({"rows": [run_facts.row_facts(row) for row in rows]})
        else:
            cells = [
                (
                    f"{row.repository.tenant.slug}/{row.repository.slug}",
                    f"{row.version.file.path}:{row.start_line}-{row.end_line}",
                    row.undeliverable_reason,
                    " ".join(row.text[:_TEXT_SHOWN].split()),
                )
                for row in rows
            ]
            self.print_table(Table(("repository", "place", "reason", "text"), cells, empty="No undeliverable row."))

    def _retry(self, options: Options) -> None:
        chosen = registry.match_repositories(options["tenant"], options["repository"])
        retried = sum(store.retry_undeliverable(repository) for repository in chosen)
        self.stdout.write(
            f"{retried} rows are tried again by the next sweep."
            if retried
            else "No undeliverable row: nothing to retry."
        )
