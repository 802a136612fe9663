"""Facts about rows for the commands and the admin: one query per list, whatever its length."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import Any

from django.db.models import (
    Case,
    Count,
    DurationField,
    ExpressionWrapper,
    F,
    Min,
    OuterRef,
    QuerySet,
    Subquery,
    When,
)
from django.db.models.functions import Coalesce, JSONObject, Now

from embeddings.models import (
    EmbeddingGeneration,
    EmbeddingTask,
    Provider,
    Repository,
    RepositoryOutcome,
    Tenant,
    TenantApiKey,
)
from embeddings.states import ProviderKind, TaskState

UNQUEUED = (
    "calls are neither queued nor capped here, and a timeout opens no circuit: behind a remote service there is no "
    "single server to protect, so the guarantee of the queued providers does not hold."
)


def providers() -> QuerySet[Provider]:
    """All providers, with `dimensions` (of the current embedding model), `queued` and `dispatched` (embedding tasks), and
    `is_busy` by the database's clock.
    """
    generation = EmbeddingGeneration.objects.filter(provider=OuterRef("pk"), model=OuterRef("embedding_model"))
    return Provider.objects.annotate(
        dimensions=Subquery(generation.values("dimensions")[:1]),
        queued=_task_count(TaskState.QUEUED),
        dispatched=_task_count(TaskState.DISPATCHED),
        is_busy=Case(When(busy_until__gt=Now(), then=True), default=False),
    ).order_by("name")


def _task_count(state: TaskState) -> Coalesce:
    """The number of a provider's tasks in this state; never reads the many settled ones."""
    tasks = (
        EmbeddingTask.objects.filter(provider=OuterRef("pk"), settled_at=None, state=state)
        .order_by()
        .values("provider")
    )
    return Coalesce(Subquery(tasks.annotate(count=Count("pk")).values("count")), 0)


def tasks_in(state: TaskState) -> dict[tuple[int, int], tuple[int, timedelta]]:
    """By provider and priority: the number of embedding tasks in this state, and how long ago the oldest was queued."""
    rows = EmbeddingTask.objects.filter(settled_at=None, state=state).order_by().values_list("provider", "priority")
    waited = ExpressionWrapper(Now() - Min("queued_at"), DurationField())
    return {
        (provider, priority): (number, waited)
        for provider, priority, number, waited in rows.annotate(Count("pk"), waited=waited)
    }


def tenants() -> QuerySet[Tenant]:
    """All tenants, with their providers, `repository_count` (not removed) and `key_count` (not revoked)."""
    repositories = Repository.objects.filter(tenant=OuterRef("pk"), removed_at=None).values("tenant")
    keys = TenantApiKey.objects.filter(tenant=OuterRef("pk"), revoked_at=None).values("tenant")
    return (
        Tenant.objects.select_related("embedding_provider", "chat_provider")
        .annotate(
            repository_count=Subquery(repositories.annotate(count=Count("pk")).values("count")),
            key_count=Subquery(keys.annotate(count=Count("pk")).values("count")),
        )
        .order_by("slug")
    )


def keys(tenant: Tenant | None = None) -> QuerySet[TenantApiKey]:
    """All keys, or one tenant's, with their tenants."""
    found = TenantApiKey.objects.select_related("tenant").order_by("tenant__slug", "pk")
    return found.filter(tenant=tenant) if tenant else found


def repositories(tenant: Tenant | None = None) -> QuerySet[Repository]:
    """All repositories or one tenant's, without removed ones, with `last` (see `with_last_outcome`)."""
    found = with_last_outcome(Repository.objects.filter(removed_at=None)).order_by("tenant__slug", "slug")
    return found.filter(tenant=tenant) if tenant else found


def with_last_outcome(found: QuerySet[Repository]) -> QuerySet[Repository]:
    """Adds the tenant and `last`: a dict of the newest outcome, or None if never swept."""
    newest = RepositoryOutcome.objects.filter(repository=OuterRef("pk")).order_by("-pk")
    facts = ("status", "error_code", "rows", "pending", "undeliverable", "finished_at", "run_id")
    last = newest.values(facts=JSONObject(**{fact: F(fact) for fact in facts}))[:1]
    return found.select_related("tenant").annotate(last=Subquery(last))


def provider_facts(provider: Any) -> dict[str, Any]:
    """One of `providers()` for `--json`."""
    budgets = [field.name for field in Provider._meta.get_fields() if field.name.endswith("_ms")]
    return {
        "name": provider.name,
        "kind": provider.kind,
        "base_url": provider.base_url,
        "embedding_model": provider.embedding_model,
        "dimensions": provider.dimensions,
        "chat_model": provider.chat_model,
        "api_key_env": provider.api_key_env,
        "api_key_is_set": bool(provider.api_key_env and os.environ.get(provider.api_key_env)),
        "batch_size": provider.batch_size,
        "batch_characters": provider.batch_characters,
        "chunk_characters": provider.chunk_characters,
        "chunk_tokens": provider.chunk_tokens,
        "max_in_flight": provider.max_in_flight,
        **{budget: getattr(provider, budget) for budget in budgets},
        "accepts_missing_finish": provider.accepts_missing_finish,
        "admission": admission(provider),
        "is_queued": provider.kind != ProviderKind.GEMINI,
        "state": provider_state(provider),
        "queued": provider.queued,
        "dispatched": provider.dispatched,
    }


def moment(when: datetime | None) -> str:
    """A moment in UTC, to the second; empty for none."""
    return when.strftime("%Y-%m-%d %H:%M:%SZ") if when else ""


def admission(provider: Provider) -> str:
    """How many calls the provider gets in parallel."""
    if provider.kind == ProviderKind.OPENAI_COMPATIBLE:
        return "single lane"
    if provider.kind == ProviderKind.OLLAMA:
        return f"{provider.max_in_flight} at once"
    return "unqueued"


def provider_state(provider: Any) -> str:
    """Of one of `providers()`: `paused`, `busy until <moment>` or `ready`."""
    if provider.is_paused:
        return "paused"
    if provider.is_busy:
        return f"busy until {provider.busy_until:%H:%M:%SZ}"
    return "ready"


def tenant_facts(tenant: Any) -> dict[str, Any]:
    """One of `tenants()` for `--json`."""
    return {
        "tenant": tenant.slug,
        "name": tenant.name,
        "embedding_provider": str(tenant.embedding_provider) if tenant.embedding_provider else None,
        "chat_provider": str(tenant.chat_provider) if tenant.chat_provider else None,
        "repositories": tenant.repository_count or 0,
        "keys": tenant.key_count or 0,
        "is_active": tenant.is_active,
    }


def key_facts(key: TenantApiKey) -> dict[str, Any]:
    """One of `keys()` for `--json`; never the digest."""
    return {
        "prefix": key.prefix,
        "tenant": key.tenant.slug,
        "label": key.label,
        "scopes": key.scopes,
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "revoked_at": key.revoked_at,
    }


def repository_facts(repository: Any) -> dict[str, Any]:
    """One of `repositories()` for `--json`; counts are from its newest outcome."""
    last = repository.last or {}
    return {
        "tenant": repository.tenant.slug,
        "repository": repository.slug,
        "source": repository.source,
        "ref": repository.ref,
        "include": repository.include,
        "exclude": repository.exclude,
        "enabled": repository.enabled,
        "cadence_minutes": repository.cadence_minutes,
        "indexed_revision": repository.indexed_revision,
        "next_due_at": repository.next_due_at,
        "last_status": last.get("status"),
        "last_error_code": last.get("error_code") or None,
        "rows": last.get("rows", 0),
        "pending": last.get("pending", 0),
        "undeliverable": last.get("undeliverable", 0),
    }
