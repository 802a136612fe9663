"""`manage.py doctor`: the problems of this installation, and how to mend each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from embeddings.doctor.findings import Status
from embeddings.management.base import SluicegateCommand, add_json
from embeddings.management.rendering import Table
from streaming.doctor import examination


class Unwell(CommandError):
    """At least one finding is an error."""


class Command(SluicegateCommand):
    help = (
        "Lists the problems of this installation and how to mend each. Changes nothing, and calls no model server unless "
        "told to. Exit status 1 where there is an error, 0 otherwise."
    )
    examples = "doctor\ndoctor --providers\ndoctor --json"
    # The `settings` check reports the failures of system checks as findings.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--providers", action="store_true", help="also ask each model server for its models, once")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        found = examination(asks_providers=options["providers"])
        errors = sum(finding.status == Status.ERROR for finding in found)
        if options["json"]:
            self.print_json({"ok": not errors, "checks": [asdict(finding) for finding in found]})
        else:
            rows: list[tuple[str, str, str]] = []
            for finding in found:
                rows.append((finding.status, finding.name, finding.detail))
                if finding.advice:
                    rows.append(("", "", f"-> {finding.advice}"))
            self.print_table(Table(columns=("status", "check", "finding"), rows=rows))
        if errors:
            raise Unwell(f"{errors} {'error' if errors == 1 else 'errors'}.")
