"""Repositories: add, set, remove."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.core.exceptions import ValidationError
from django.db.models.functions import Now

from embeddings.errors import UsageError
from embeddings.models import Repository, Tenant
from embeddings.registry.rules import clean_repository, one_line
from embeddings.runs import sweep

# A change to one of these changes the files that a sweep sees.
_AFFECTS_SWEEP = frozenset({"source", "ref", "include", "exclude", "enabled"})


@dataclass(frozen=True)
class RepositoryChange:
    """The result of `add_repository` or `set_repository`, with notes for the person."""

    repository: Repository
    created: bool
    changed: tuple[str, ...]
    notes: tuple[str, ...] = ()


def add_repository(tenant: Tenant, slug: str, source: str, values: Mapping[str, object]) -> RepositoryChange:
    """Adds a repository to the tenant. An existing one with this slug must have the same values.

    Raises UsageError.
    """
    if not tenant.is_active:
        raise UsageError(f"Tenant {tenant} is not active: `manage.py tenant add {tenant}` brings it back.")
    wanted = Repository(tenant=tenant, slug=slug, source=source, **values)
    present = Repository.objects.filter(tenant=tenant, slug=slug, removed_at=None).first()
    if present is None:
        _clean(wanted)
        save_repository(wanted, ())
        return RepositoryChange(wanted, created=True, changed=(), notes=repository_notes(wanted))
    wanted.pk, wanted._state.adding = present.pk, False
    _clean(wanted)
    differing = [field for field in ("source", *values) if getattr(wanted, field) != getattr(present, field)]
    if differing:
        flags = " ".join(f"--{field} ..." for field in differing)
        raise UsageError(
            f"{present} exists already with another {' and '.join(differing)}: change it with "
            f"`manage.py repository set {tenant} {slug} {flags}`, or choose another slug."
        )
    return RepositoryChange(present, created=False, changed=())


def set_repository(repository: Repository, values: Mapping[str, object]) -> RepositoryChange:
    """Sets these fields of an existing repository. Raises UsageError."""
    before = {field: getattr(repository, field) for field in values}
    for field, value in values.items():
        setattr(repository, field, value)
    _clean(repository)
    changed = tuple(field for field in values if getattr(repository, field) != before[field])
    save_repository(repository, changed)
    return RepositoryChange(repository, created=False, changed=changed, notes=repository_notes(repository))


def save_repository(repository: Repository, changed: Collection[str]) -> None:
    """Stores a cleaned repository: only the changed fields of an existing one, since sweeps write to the same row."""
    if repository._state.adding:
        repository.next_due_at = Now()
        repository.save()
        repository.refresh_from_db(fields=["next_due_at"])
        return
    fields = set(changed)
    if fields & _AFFECTS_SWEEP:
        repository.next_due_at = Now()
        fields.add("next_due_at")
    if fields:
        repository.save(update_fields=fields)
        repository.refresh_from_db(fields=["next_due_at"])


def remove_repository(repository: Repository) -> bool:
    """Hides the repository's rows from search immediately and cancels unfinished work; a purge deletes the rows.

    Whether this changed anything.
    """
    removed = Repository.objects.filter(pk=repository.pk, removed_at=None).update(removed_at=Now())
    if removed:
        sweep.cancel_repository(repository)
    return bool(removed)


def repository_notes(repository: Repository) -> tuple[str, ...]:
    """Warnings about this repository's values, one line each."""
    if repository.source.startswith("/") and not os.path.isdir(repository.source):
        return (f"There is no directory {repository.source} on this machine: sweeps are deferred until it exists.",)
    return ()


def _clean(repository: Repository) -> None:
    try:
        clean_repository(repository)
    except ValidationError as refused:
        raise one_line(f"Repository {repository}", refused) from refused
