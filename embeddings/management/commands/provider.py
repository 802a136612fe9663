"""`manage.py provider`: the model servers."""

from __future__ import annotations

import argparse
from typing import Any

from embeddings import registry
from embeddings.management.base import NounCommand, Options, add_json, whole_number
from embeddings.management.rendering import Table
from embeddings.models import Provider
from embeddings.reports import facts
from embeddings.states import ProviderKind

_NUMBERS = {
    "batch_size": "texts in one embedding call (32)",
    "batch_characters": "characters in one embedding call (60000)",
    "chunk_characters": "characters in one row (1200)",
    "chunk_tokens": "tokens in one row, as estimated (480)",
    "max_in_flight": "embedding calls in parallel; an openai-compatible provider always takes 1 (1)",
    "embedding_timeout_ms": "deadline of one call for a sweep (300000)",
    "query_timeout_ms": "deadline of one call for a search or a turn (15000)",
    "request_timeout_ms": "chat: connect, headers and the body of an error (120000)",
    "stream_idle_timeout_ms": "chat: silence between chunks; 0 or less disables (120000)",
    "stream_first_content_timeout_ms": "chat: headers to first content (as the idle budget)",
    "stream_keepalive_timeout_ms": "chat: bytes but no chunk (as the idle budget)",
    "stream_lifetime_ms": "chat: one attempt (900000)",
    "turn_wall_ms": "chat: a whole turn (3600000)",
}
_UNSETTABLE = frozenset({"stream_first_content_timeout_ms", "stream_keepalive_timeout_ms"})
_TEXTS = {
    "base_url": ("URL", "the server's address, such as http://127.0.0.1:8089/v1"),
    "embedding_model": ("NAME", "the embedding model; the next sweep re-embeds with a new one"),
    "chat_model": ("NAME", "the chat model"),
    "api_key_env": ("SLUICEGATE_KEY_X", "the environment variable that holds the server's key"),
}


class Command(NounCommand):
    help = "Sets up, lists, pauses and resumes the model servers."
    examples = (
        "provider set local --kind openai-compatible --base-url http://127.0.0.1:8089/v1 --embedding-model minilm\n"
        "provider list\n"
        "provider pause local"
    )

    def add_actions(self, actions: Any) -> None:
        example = (
            "provider set local --base-url http://127.0.0.1:8089/v1 --embedding-model minilm --chat-model smollm2\n"
            "provider set local --embedding-timeout-ms 60000\n"
            "provider set local --stream-keepalive-timeout-ms unset"
        )
        change = self.add_action(
            actions, "set", self._set, "Makes a provider, or changes the given values of an existing one.", example
        )
        change.add_argument("--kind", choices=ProviderKind.values, default=argparse.SUPPRESS)
        for field, (metavar, text) in _TEXTS.items():
            change.add_argument(_flag(field), metavar=metavar, help=text, default=argparse.SUPPRESS)
        for field, text in _NUMBERS.items():
            number = _number_or_unset if field in _UNSETTABLE else whole_number
            change.add_argument(_flag(field), type=number, metavar="N", help=text, default=argparse.SUPPRESS)
        change.add_argument(
            "--accepts-missing-finish",
            action=argparse.BooleanOptionalAction,
            help="chat: a stream that ends without a finish reason is completed",
            default=argparse.SUPPRESS,
        )
        listing = self.add_action(actions, "list", self._list, "Lists the providers.", "provider list --json")
        add_json(listing)
        pause = self.add_action(
            actions, "pause", self._pause, "Stops dispatching to a provider.", "provider pause local"
        )
        resume = self.add_action(
            actions, "resume", self._resume, "Resumes dispatching to a paused provider.", "provider resume local"
        )
        for parser in (change, pause, resume):
            parser.add_argument("name", help="the provider's name")

    def _set(self, options: Options) -> None:
        fields = ("kind", *_TEXTS, *_NUMBERS, "accepts_missing_finish")
        change = registry.set_provider(options["name"], {field: options[field] for field in fields if field in options})
        for note in change.notes:
            self.note(note)
        provider: Provider = change.provider
        if change.created:
            self.stdout.write(f"Provider {provider} made: {provider.kind} at {provider.base_url}.")
        elif not change.changed:
            self.stdout.write(f"Provider {provider}: nothing changed.")
        else:
            values = ", ".join(f"{field} is now {getattr(provider, field)}" for field in change.changed)
            self.stdout.write(f"Provider {provider} changed: {values}.")

    def _list(self, options: Options) -> None:
        providers = [facts.provider_facts(provider) for provider in facts.providers()]
        if options["json"]:
            self.print_json({"providers": providers})
            return
        self.print_table(_table(providers))
        for provider in providers:
            if not provider["is_queued"]:
                self.note(f"{provider['name']}: {facts.UNQUEUED}")

    def _pause(self, options: Options) -> None:
        provider = registry.find_provider(options["name"])
        changed = registry.pause_provider(provider)
        self.stdout.write(f"Provider {provider} is paused." if changed else f"Provider {provider} was paused already.")

    def _resume(self, options: Options) -> None:
        provider = registry.find_provider(options["name"])
        changed = registry.resume_provider(provider)
        self.stdout.write(f"Provider {provider} is resumed." if changed else f"Provider {provider} was not paused.")


def _table(providers: list[dict[str, Any]]) -> Table:
    missing = {one["name"] for one in providers if one["api_key_env"] and not one["api_key_is_set"]}
    return Table(
        columns=(
            "name",
            "kind",
            "base url",
            "embedding model",
            "dimensions",
            "chat model",
            "key",
            "admission",
            "state",
        ),
        rows=[
            (
                provider["name"],
                provider["kind"],
                provider["base_url"],
                provider["embedding_model"] or "-",
                str(provider["dimensions"] or "-"),
                provider["chat_model"] or "-",
                (provider["api_key_env"] or "-") + (" (not set)" if provider["name"] in missing else ""),
                provider["admission"],
                provider["state"],
            )
            for provider in providers
        ],
        numbers=frozenset({"dimensions"}),
        empty="No provider yet. Make one: manage.py provider set local --base-url http://127.0.0.1:8089/v1 "
        "--embedding-model NAME",
    )


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _number_or_unset(text: str) -> int | None:
    return None if text == "unset" else whole_number(text)
