"""`manage.py repository`: the git sources of the tenants."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandParser

from embeddings import registry
from embeddings.management.base import NounCommand, Options, add_json, positive_number
from embeddings.management.rendering import Table
from embeddings.reports import facts
from embeddings.reports.facts import moment

_GIVEN = ("ref", "include", "exclude", "cadence_minutes")


class Command(NounCommand):
    help = "Adds, changes, lists and removes the tenants' git repositories."
    examples = (
        "repository add acme docs /srv/git/docs\n"
        "repository add acme app https://git.example.com/app.git --ref main --include 'src/' --exclude '*.min.js'\n"
        "repository list --tenant acme"
    )

    def add_actions(self, actions: Any) -> None:
        add = self.add_action(actions, "add", self._add, "Adds a git repository to a tenant.", self.examples)
        change = self.add_action(
            actions,
            "set",
            self._set,
            "Changes the given values; the next sweep applies them.",
            "repository set acme docs --ref release\nrepository set acme docs --disable",
        )
        listing = self.add_action(actions, "list", self._list, "Lists the repositories.", "repository list --json")
        listing.add_argument("--tenant", help="only this tenant's repositories")
        add_json(listing)
        remove = self.add_action(
            actions,
            "remove",
            self._remove,
            "Hides a repository's rows from search immediately and cancels its unfinished work.",
            "repository remove acme docs",
        )
        for parser in (add, change, remove):
            parser.add_argument("tenant", help="the tenant's slug")
            parser.add_argument("slug", help="the repository's slug")
        source = "a path on this machine, or an https or ssh URL"
        add.add_argument("source", help=source)
        change.add_argument("--source", default=argparse.SUPPRESS, help=source)
        for parser in (add, change):
            _add_values(parser)
        switch = change.add_mutually_exclusive_group()
        switch.add_argument("--enable", dest="enabled", action="store_true", default=argparse.SUPPRESS)
        switch.add_argument("--disable", dest="enabled", action="store_false", default=argparse.SUPPRESS)

    def _add(self, options: Options) -> None:
        tenant = registry.find_tenant(options["tenant"])
        change = registry.add_repository(tenant, options["slug"], options["source"], _values(options, _GIVEN))
        for note in change.notes:
            self.note(note)
        if change.created:
            self.stdout.write(f"Repository {change.repository} added from {change.repository.source}.")
        else:
            self.stdout.write(f"Repository {change.repository} exists already; nothing changed.")

    def _set(self, options: Options) -> None:
        repository = registry.find_repository(registry.find_tenant(options["tenant"]), options["slug"])
        change = registry.set_repository(repository, _values(options, ("source", *_GIVEN, "enabled")))
        for note in change.notes:
            self.note(note)
        values = ", ".join(f"{field} is now {getattr(repository, field) or 'empty'}" for field in change.changed)
        self.stdout.write(f"Repository {repository}: {values or 'nothing changed'}.")

    def _list(self, options: Options) -> None:
        tenant = registry.find_tenant(options["tenant"]) if options["tenant"] else None
        repositories = [facts.repository_facts(repository) for repository in facts.repositories(tenant)]
        if options["json"]:
            self.print_json({"repositories": repositories})
            return
        table = Table(
            columns=("repository", "source", "ref", "rows", "pending", "revision", "last outcome", "next due", "state"),
            rows=[
                (
                    f"{repository['tenant']}/{repository['repository']}",
                    repository["source"],
                    repository["ref"] or "-",
                    str(repository["rows"]),
                    str(repository["pending"]),
                    repository["indexed_revision"][:10] or "-",
                    repository["last_status"] or "never swept",
                    moment(repository["next_due_at"]) or "-",
                    "enabled" if repository["enabled"] else "disabled",
                )
                for repository in repositories
            ],
            numbers=frozenset({"rows", "pending"}),
            empty="No repository yet. Add one: manage.py repository add TENANT SLUG /path/or/git-url",
        )
        self.print_table(table)

    def _remove(self, options: Options) -> None:
        repository = registry.find_repository(registry.find_tenant(options["tenant"]), options["slug"])
        registry.remove_repository(repository)
        self.stdout.write(f"Repository {repository} removed: its rows are hidden now and deleted by the next purge.")


def _add_values(parser: CommandParser) -> None:
    parser.add_argument("--ref", default=argparse.SUPPRESS, help="a branch, a tag or a full commit id (default branch)")
    for field, text in (("include", "take only files that match"), ("exclude", "leave out files that match")):
        parser.add_argument(
            f"--{field}",
            action="append",
            metavar="PATTERN",
            default=argparse.SUPPRESS,
            help=f"{text}, as in .gitignore; may be repeated",
        )
    parser.add_argument(
        "--cadence-minutes", type=positive_number, metavar="N", default=argparse.SUPPRESS, help="minutes between sweeps"
    )


def _values(options: Options, fields: Sequence[str]) -> dict[str, object]:
    """The given values. An empty pattern, as in `--include ''`, clears the list."""
    values = {field: options[field] for field in fields if field in options}
    for field in {"include", "exclude"} & values.keys():
        values[field] = [pattern for pattern in values[field] if pattern]
    return values
