"""`manage.py search`: searches a tenant's repositories."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from embeddings import registry
from embeddings.errors import SluicegateError, UsageError
from embeddings.management.base import SluicegateCommand, add_json, positive_number
from embeddings.management.rendering import printable
from embeddings.query.search import search

_LINES_SHOWN = 8


class Failed(CommandError):
    """The search was valid, but embedding its words failed."""


class Command(SluicegateCommand):
    help = "Searches a tenant's repositories by meaning. Exit status 1 where the provider fails."
    examples = 'search acme "how is a batch chosen"\nsearch acme "retry after" --limit 3 --json'

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", help="the tenant's slug")
        parser.add_argument("query", metavar="words", help="the question, in plain words")
        parser.add_argument("--limit", type=positive_number, default=5, metavar="N", help="how many results (5)")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        tenant = registry.find_active_tenant(options["tenant"])
        try:
            hits = search(tenant, options["query"], options["limit"])
        except UsageError:
            raise
        except SluicegateError as error:
            raise Failed(f"{error.code}: {printable(str(error))}") from error
        if options["json"]:
            self.print_json({"results": [asdict(hit) for hit in hits]})
            return
        for hit in hits:
            place = f"{hit.repository} {hit.path}:{hit.start_line}-{hit.end_line}"
            self.stdout.write(self.style.SUCCESS(printable(place)) + f"  {hit.score:.3f}")
            lines = printable(hit.text).splitlines()
            for line in lines[:_LINES_SHOWN]:
                self.stdout.write(f"    {line}")
            if len(lines) > _LINES_SHOWN:
                self.stdout.write("    ...")
            self.stdout.write("")
        if not hits:
            self.stdout.write(
                f"Nothing found. `manage.py repository list --tenant {tenant}` shows the indexed repositories."
            )
