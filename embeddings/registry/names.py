"""Looks rows up by the names that people type; the error for an unknown name lists the known ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django.db.models import Q, QuerySet

from embeddings.errors import UsageError
from embeddings.models import Provider, Repository, Tenant
from embeddings.runs.schedule import sweepable

_NAMES_SHOWN = 20


def find_provider(name: str) -> Provider:
    """The provider of this name. Raises UsageError."""
    found = Provider.objects.filter(name=name).first()
    if found is None:
        known = Provider.objects.order_by("name").values_list("name", flat=True)
        raise _unknown("provider", name, known, "make one with `manage.py provider set`")
    return found


def find_tenant(slug: str) -> Tenant:
    """The tenant of this slug, active or not, with its providers. Raises UsageError."""
    found = Tenant.objects.select_related("embedding_provider", "chat_provider").filter(slug=slug).first()
    if found is None:
        known = Tenant.objects.filter(is_active=True).order_by("slug").values_list("slug", flat=True)
        raise _unknown("tenant", slug, known, "make one with `manage.py tenant add`")
    return found


def find_active_tenant(slug: str) -> Tenant:
    """The active tenant of this slug. Raises UsageError."""
    found = find_tenant(slug)
    if not found.is_active:
        raise _not_active(found)
    return found


def find_repository(tenant: Tenant, slug: str) -> Repository:
    """The tenant's repository of this slug that is not removed. Raises UsageError."""
    found = present_repositories().filter(tenant=tenant, slug=slug).first()
    if found is None:
        known = present_repositories().filter(tenant=tenant).order_by("slug").values_list("slug", flat=True)
        hint = f"make one with `manage.py repository add {tenant} SLUG SOURCE`"
        raise _unknown(f"repository of tenant {tenant}", slug, known, hint)
    return found


def select_repositories(tenants: Sequence[str] = (), repositories: Sequence[str] = ()) -> list[Repository]:
    """The repositories of a sweep: `tenants` by slug and `repositories` as `tenant/slug`; both empty for all.

    Only enabled repositories of active tenants with an embedding provider. Raises UsageError if a name is unknown, if a
    repository given by name cannot be swept, or if no repository remains.
    """
    for slug in dict.fromkeys(tenants):
        find_active_tenant(slug)
    for name in dict.fromkeys(repositories):
        repository = _named_repository(name)
        tenant = repository.tenant
        if not tenant.is_active:
            raise _not_active(tenant)
        if not repository.enabled:
            enable = f"`manage.py repository set {tenant} {repository.slug} --enable`"
            raise UsageError(f"{repository} is disabled: {enable}.")
        if tenant.embedding_provider is None:
            raise _without_provider(tenant)
    return require_sweepable(match_repositories(tenants, repositories))


def require_sweepable(candidates: QuerySet[Repository]) -> list[Repository]:
    """The candidates that a sweep may take. Raises UsageError, with the command to use, if there are none."""
    present = candidates.filter(removed_at=None).select_related("tenant__embedding_provider")
    may_be_swept = present.filter(pk__in=sweepable(), tenant__embedding_provider__isnull=False)
    chosen = list(may_be_swept.order_by("tenant__slug", "slug"))
    if not chosen:
        raise _nothing_to_sweep(present)
    return chosen


def match_repositories(tenants: Sequence[str] = (), repositories: Sequence[str] = ()) -> QuerySet[Repository]:
    """Repositories that are not removed, of `tenants` by slug and `repositories` as `tenant/slug`; both empty for all.

    Raises UsageError if a name is unknown.
    """
    found = present_repositories().order_by("tenant__slug", "slug")
    if not tenants and not repositories:
        return found
    named = [_named_repository(name).pk for name in dict.fromkeys(repositories)]
    owners = [find_tenant(slug).pk for slug in dict.fromkeys(tenants)]
    return found.filter(Q(pk__in=named) | Q(tenant__in=owners))


def present_repositories() -> QuerySet[Repository]:
    """Repositories that are not removed, with tenant and providers."""
    return Repository.objects.filter(removed_at=None).select_related("tenant__embedding_provider")


def _named_repository(name: str) -> Repository:
    tenant, slash, slug = name.partition("/")
    if not slash or not tenant or not slug:
        raise UsageError(f"{name!r} is not a repository's name: write it as tenant/repository.")
    return find_repository(find_tenant(tenant), slug)


def _nothing_to_sweep(candidates: QuerySet[Repository]) -> UsageError:
    if not Tenant.objects.filter(is_active=True).exists():
        return UsageError("There is no tenant yet: `manage.py tenant add acme --embedding-provider NAME` makes one.")
    first = candidates.filter(tenant__is_active=True).order_by("tenant__slug", "slug").first()
    if first is None:
        return UsageError(
            "There is no repository to sweep: `manage.py repository add TENANT SLUG /path/or/git-url` makes one."
        )
    if first.tenant.embedding_provider is None:
        return _without_provider(first.tenant)
    return UsageError(
        f"No repository is enabled: `manage.py repository set {first.tenant} {first.slug} --enable` enables one."
    )


def _not_active(tenant: Tenant) -> UsageError:
    return UsageError(f"Tenant {tenant} is not active: `manage.py tenant add {tenant}` brings it back.")


def _without_provider(tenant: Tenant) -> UsageError:
    return UsageError(
        f"Tenant {tenant} has no embedding provider: `manage.py tenant set {tenant} --embedding-provider NAME`."
    )


def _unknown(what: str, name: str, known: Iterable[str], hint: str) -> UsageError:
    names = list(known)
    if not names:
        return UsageError(f"There is no {what} {name!r}, and no other: {hint}.")
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return UsageError(f"There is no {what} {name!r}. There is: {shown}.")
