"""`manage.py key`: the tenants' API keys."""

from __future__ import annotations

from typing import Any

from embeddings import registry
from embeddings.management.base import NounCommand, Options, add_json
from embeddings.management.rendering import Table
from embeddings.reports import facts
from embeddings.reports.facts import moment


class Command(NounCommand):
    help = "Issues, lists and revokes the tenants' keys for the endpoints."
    examples = "key issue acme --label editor\nkey list\nkey revoke 1f0c9a27b3de"

    def add_actions(self, actions: Any) -> None:
        issue = self.add_action(
            actions,
            "issue",
            self._issue,
            "Issues a key. It is shown once, as the last word of the output.",
            "key issue acme --label editor --scope chat --scope search",
        )
        issue.add_argument("tenant", help="the tenant's slug")
        issue.add_argument("--label", default="", help="the purpose of the key")
        issue.add_argument(
            "--scope",
            action="append",
            default=[],
            choices=registry.KeyScope.values,
            help="a scope of the key; may be repeated; all scopes if not given",
        )
        listing = self.add_action(actions, "list", self._list, "Lists the keys.", "key list --tenant acme")
        listing.add_argument("--tenant", help="only this tenant's keys")
        add_json(listing)
        revoke = self.add_action(
            actions, "revoke", self._revoke, "Revokes a key immediately.", "key revoke 1f0c9a27b3de"
        )
        revoke.add_argument("prefix", help="the key's prefix, as `key list` shows it")

    def _issue(self, options: Options) -> None:
        tenant = registry.find_tenant(options["tenant"])
        row, key = registry.issue_key(tenant, label=options["label"], scopes=options["scope"])
        self.stdout.write(f"Key for {tenant} ({', '.join(row.scopes)}), shown this once: {key}")

    def _list(self, options: Options) -> None:
        tenant = registry.find_tenant(options["tenant"]) if options["tenant"] else None
        keys = list(facts.keys(tenant))
        if options["json"]:
            self.print_json({"keys": [facts.key_facts(key) for key in keys]})
            return
        rows = [
            (
                key.prefix,
                key.tenant.slug,
                key.label or "-",
                " ".join(key.scopes),
                moment(key.created_at),
                moment(key.last_used_at) or "never",
                moment(key.revoked_at) or "-",
            )
            for key in keys
        ]
        columns = ("prefix", "tenant", "label", "scopes", "issued", "last used", "revoked")
        self.print_table(Table(columns, rows, empty="No key yet. Issue one: manage.py key issue TENANT"))

    def _revoke(self, options: Options) -> None:
        key = registry.find_key(options["prefix"])
        changed = registry.revoke_key(key)
        self.stdout.write(
            f"Key {key.prefix} of {key.tenant} is revoked." if changed else f"Key {key.prefix} was revoked already."
        )
