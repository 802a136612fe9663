"""Tenants: add, set, remove."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models.functions import Now

from embeddings.errors import UsageError
from embeddings.models import Repository, Tenant
from embeddings.registry.repositories import remove_repository
from embeddings.registry.rules import clean_tenant, one_line


@dataclass(frozen=True)
class TenantChange:
    """The result of `add_tenant` or `set_tenant`."""

    tenant: Tenant
    created: bool
    changed: tuple[str, ...]


def add_tenant(slug: str, values: Mapping[str, object]) -> TenantChange:
    """Creates the tenant or reactivates a removed one. An active one must already have these `values`.

    Raises UsageError.
    """
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        return _store(Tenant(slug=slug), values)
    if not tenant.is_active:
        return _store(tenant, {**values, "is_active": True})
    differing = [field for field, value in values.items() if getattr(tenant, field) != value]
    if differing:
        flags = " ".join(f"--{field.replace('_', '-')} ..." for field in differing)
        raise UsageError(f"Tenant {slug} exists already: change it with `manage.py tenant set {slug} {flags}`.")
    return TenantChange(tenant, created=False, changed=())


def set_tenant(tenant: Tenant, values: Mapping[str, object]) -> TenantChange:
    """Sets these fields of an existing tenant. Raises UsageError."""
    return _store(tenant, values)


def save_tenant(tenant: Tenant, changed: Collection[str]) -> None:
    """Stores a cleaned tenant."""
    if tenant._state.adding:
        tenant.save()
    elif changed:
        tenant.save(update_fields=changed)


def remove_tenant(tenant: Tenant) -> int:
    """Deactivates the tenant, revokes its keys and removes its repositories; returns the number of repositories.

    The slug stays taken, because runs and turns still refer to it.
    """
    with transaction.atomic():
        Tenant.objects.filter(pk=tenant.pk).update(is_active=False)
        tenant.api_keys.filter(revoked_at=None).update(revoked_at=Now())
    present = Repository.objects.filter(tenant=tenant, removed_at=None).order_by("pk")
    return sum(remove_repository(repository) for repository in present)


def _store(tenant: Tenant, values: Mapping[str, object]) -> TenantChange:
    created = tenant._state.adding
    changed = tuple(field for field, value in values.items() if getattr(tenant, field) != value)
    for field in changed:
        setattr(tenant, field, values[field])
    try:
        clean_tenant(tenant)
    except ValidationError as refused:
        raise one_line(f"Tenant {tenant.slug}", refused) from refused
    save_tenant(tenant, changed)
    return TenantChange(tenant, created, changed)
