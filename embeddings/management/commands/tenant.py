"""`manage.py tenant`: the owners of repositories."""

from __future__ import annotations

import argparse
from typing import Any

from embeddings import registry
from embeddings.management.base import NounCommand, Options, add_json
from embeddings.management.rendering import Table
from embeddings.reports import facts


class Command(NounCommand):
    help = "Adds, changes, lists and removes tenants."
    examples = "tenant add acme --embedding-provider local --chat-provider local\ntenant list"

    def add_actions(self, actions: Any) -> None:
        add = self.add_action(
            actions,
            "add",
            self._add,
            "Adds a tenant.",
            "tenant add acme --embedding-provider local --chat-provider local",
        )
        change = self.add_action(
            actions, "set", self._set, "Changes a tenant.", "tenant set acme --embedding-provider other"
        )
        for parser in (add, change):
            parser.add_argument("slug", help="the tenant's slug: lower-case letters, digits, dots, dashes, underscores")
            parser.add_argument("--name", default=argparse.SUPPRESS, help="a display name")
            for use in ("embedding", "chat"):
                parser.add_argument(
                    f"--{use}-provider", metavar="PROVIDER", default=argparse.SUPPRESS, help=f"the provider for {use}"
                )
        listing = self.add_action(actions, "list", self._list, "Lists the tenants.", "tenant list --json")
        add_json(listing)
        remove = self.add_action(
            actions,
            "remove",
            self._remove,
            "Revokes a tenant's keys, hides its rows immediately and cancels its unfinished work.",
            "tenant remove acme",
        )
        remove.add_argument("slug", help="the tenant's slug")

    def _add(self, options: Options) -> None:
        change = registry.add_tenant(options["slug"], _values(options))
        if change.created:
            self.stdout.write(f"Tenant {change.tenant} added.")
        elif change.changed:
            self.stdout.write(f"Tenant {change.tenant} is active again; it has no key and no repository yet.")
        else:
            self.stdout.write(f"Tenant {change.tenant} exists already; nothing changed.")
        if change.tenant.embedding_provider is None:
            self.note(f"Tenant {change.tenant} has no embedding provider yet: it cannot be swept or searched.")

    def _set(self, options: Options) -> None:
        change = registry.set_tenant(registry.find_tenant(options["slug"]), _values(options))
        values = ", ".join(f"{field} is now {getattr(change.tenant, field) or 'none'}" for field in change.changed)
        self.stdout.write(f"Tenant {change.tenant}: {values or 'nothing changed'}.")
        if "embedding_provider" in change.changed and change.tenant.embedding_provider:
            self.note("The next sweep re-embeds its repositories; until then search answers from the old vectors.")

    def _list(self, options: Options) -> None:
        tenants = [facts.tenant_facts(tenant) for tenant in facts.tenants()]
        if options["json"]:
            self.print_json({"tenants": tenants})
            return
        table = Table(
            columns=("tenant", "name", "embedding provider", "chat provider", "repositories", "keys", "state"),
            rows=[
                (
                    tenant["tenant"],
                    tenant["name"] or "-",
                    tenant["embedding_provider"] or "-",
                    tenant["chat_provider"] or "-",
                    str(tenant["repositories"]),
                    str(tenant["keys"]),
                    "active" if tenant["is_active"] else "removed",
                )
                for tenant in tenants
            ],
            numbers=frozenset({"repositories", "keys"}),
            empty="No tenant yet. Make one: manage.py tenant add acme --embedding-provider NAME",
        )
        self.print_table(table)

    def _remove(self, options: Options) -> None:
        tenant = registry.find_tenant(options["slug"])
        repositories = registry.remove_tenant(tenant)
        self.stdout.write(
            f"Tenant {tenant} removed with {repositories} repositories: its keys are revoked, its rows are hidden now "
            "and deleted by the next purge."
        )


def _values(options: Options) -> dict[str, object]:
    """The given values, with provider rows for names; an empty provider name clears the field."""
    values: dict[str, object] = {"name": options["name"]} if "name" in options else {}
    for field in ("embedding_provider", "chat_provider"):
        if field in options:
            values[field] = registry.find_provider(options[field]) if options[field] else None
    return values
