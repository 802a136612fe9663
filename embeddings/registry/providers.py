"""Providers: set, pause, resume."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.core.exceptions import ValidationError
from django.db import models, transaction

from embeddings import doorbell
from embeddings.errors import UsageError
from embeddings.models import Provider
from embeddings.registry.rules import clean_provider, one_line

# What was learned about a server says nothing about the next one.
_LEARNED = {"refuses_base64": False, "busy_until": None, "overtaken_since": None}


@dataclass(frozen=True)
class ProviderChange:
    """What `set_provider` did: the fields that changed, and the lines that the person should read."""

    provider: Provider
    created: bool
    changed: tuple[str, ...]
    notes: tuple[str, ...]


def set_provider(name: str, values: Mapping[str, object]) -> ProviderChange:
    """Makes the provider, or gives the existing one these values by field name; the others stay as they are.

    Raises UsageError with one line that names every value that was refused; nothing is stored then.
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
        save_provider(provider, changed)
    return ProviderChange(provider, created, changed, notes)


def save_provider(provider: Provider, changed: Collection[str]) -> None:
    """Stores a cleaned provider: of one that exists only what changed, since the lane writes to the same row."""
    if provider._state.adding:
        provider.save()
        return
    if not changed:
        return
    fields = {*changed, "revision"}
    if "base_url" in fields:
        for field, value in _LEARNED.items():
            setattr(provider, field, value)
        fields |= _LEARNED.keys()
    provider.save(update_fields=fields)


def notes_on(provider: Provider, changed: Collection[str]) -> tuple[str, ...]:
    """What follows from this provider's values, one line each; `changed` names the fields that got a new value."""
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
    """Nothing more is dispatched to it; what is at the provider ends by itself. Whether this changed anything."""
    return bool(Provider.objects.filter(pk=provider.pk, is_paused=False).update(is_paused=True))


def resume_provider(provider: Provider) -> bool:
    """Dispatch goes on where it was paused. Whether this changed anything."""
    resumed = Provider.objects.filter(pk=provider.pk, is_paused=True).update(is_paused=False)
    if resumed:
        doorbell.ring(doorbell.DRAIN, provider.pk)
    return bool(resumed)


def _whole_number(name: str, field: str, value: object) -> object:
    """The value, unless the field wants a whole number and got something else: Django would cut 1.5 down to 1."""
    column = Provider._meta.get_field(field)
    if not isinstance(column, models.IntegerField) or (value is None and column.null):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"Provider {name}: {field}: must be a whole number, not {value!r}.")
    return value
