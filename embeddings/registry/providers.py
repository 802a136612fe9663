"""Providers: set, pause, resume."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.core.exceptions import ValidationError
from django.db import models, transaction

from embeddings.errors import UsageError
from embeddings.knowledge import store
from embeddings.models import KnowledgeRow, Provider, Repository
from embeddings.registry.rules import clean_provider, one_line
from embeddings.runtime import wake_ups
from embeddings.states import RUN_UNFINISHED

# A change to one of these may make the provider accept a text that it refused.
_AFFECTS_REFUSALS = frozenset({"kind", "base_url", "embedding_model", "batch_size", "batch_characters"})
# Observations of the old server, to reset with a new base URL.
_LEARNED = {"refuses_base64": False, "busy_until": None, "overtaken_since": None}


@dataclass(frozen=True)
class ProviderChange:
    """The result of `set_provider`: the changed fields, and notes for the person."""

    provider: Provider
    created: bool
    changed: tuple[str, ...]
    notes: tuple[str, ...]


def set_provider(name: str, values: Mapping[str, object]) -> ProviderChange:
    """Creates the provider or sets these fields of an existing one; other fields keep their values.

    Raises UsageError, whose one line names every refused value, and then stores nothing.
    """
    with transaction.atomic():
        provider = Provider.objects.filter(name=name).first() or Provider(name=name)
        before = {field: getattr(provider, field) for field in values}
        for field, value in values.items():
            setattr(provider, field, _whole_number(name, field, value))
        try:
            clean_provider(provider)
        except ValidationError as refused:
            raise one_line(f"Provider {name}", refused) from refused
        created = provider._state.adding
        changed = tuple(field for field in values if getattr(provider, field) != before[field])
        notes = notes_on(provider, () if created else changed)
        retried = save_provider(provider, changed)
    if retried:
        notes += (f"{retried} undeliverable rows are tried again by the next sweep.",)
    return ProviderChange(provider, created, changed, notes)


def save_provider(provider: Provider, changed: Collection[str]) -> int:
    """Stores a cleaned provider: only the changed fields of an existing one, since the lane writes to the same row.

    If the server, its model or its limits changed, makes its undeliverable rows pending again; returns their number.
    """
    if provider._state.adding:
        provider.save()
        return 0
    if not changed:
        return 0
    fields = {*changed, "revision"}
    if "base_url" in fields:
        for field, value in _LEARNED.items():
            setattr(provider, field, value)
        fields |= _LEARNED.keys()
    provider.save(update_fields=fields)
    if "embedding_model" in fields:
        # Unfinished runs of the old model dispatch nothing any more: whatever they have not decided is deferred.
        for run_id in provider.runs.filter(status__in=RUN_UNFINISHED).values_list("pk", flat=True):
            wake_ups.notify_workers(wake_ups.ADVANCE, run_id)
    if not fields & _AFFECTS_REFUSALS:
        return 0
    refused = KnowledgeRow.objects.filter(generation__provider=provider).exclude(undeliverable_reason="")
    repositories = Repository.objects.filter(pk__in=refused.values("repository")).order_by("pk")
    return sum(map(store.retry_undeliverable, repositories))


def notes_on(provider: Provider, changed: Collection[str]) -> tuple[str, ...]:
    """Warnings about this provider's values, one line each; `changed` names the fields with a new value."""
    notes = []
    if provider.api_key_env and not os.environ.get(provider.api_key_env):
        notes.append(f"{provider.api_key_env} is not set here: set it for every worker, or calls will be refused.")
    if "embedding_model" in changed and provider.embedding_model:
        notes.append(
            f"The next sweep re-embeds this provider's repositories with {provider.embedding_model}; "
            f"until then search answers from the old vectors."
        )
    return tuple(notes)


def pause_provider(provider: Provider) -> bool:
    """Stops dispatching to the provider; running calls end by themselves. Whether this changed anything."""
    return bool(Provider.objects.filter(pk=provider.pk, is_paused=False).update(is_paused=True))


def resume_provider(provider: Provider) -> bool:
    """Resumes dispatching to a paused provider. Whether this changed anything."""
    resumed = Provider.objects.filter(pk=provider.pk, is_paused=True).update(is_paused=False)
    if resumed:
        wake_ups.notify_workers(wake_ups.DRAIN, provider.pk)
    return bool(resumed)


def _whole_number(name: str, field: str, value: object) -> object:
    """Refuses a value that is no whole number for an integer field: Django would truncate 1.5 to 1."""
    column = Provider._meta.get_field(field)
    if not isinstance(column, models.IntegerField) or (value is None and column.null):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"Provider {name}: {field}: must be a whole number, not {value!r}.")
    return value
