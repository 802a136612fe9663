"""The data of the admin's overview: stalled and unfinished runs, failing and due repositories, providers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db.models import Prefetch, Q
from django.db.models.functions import Now

from embeddings import codes
from embeddings.knowledge.git import SourceTimeout, SourceUnreachable
from embeddings.models import Provider, Repository, RepositoryOutcome, Tenant, TenantRun
from embeddings.reports import facts, run_facts
from embeddings.states import RUN_UNFINISHED, CircuitState, OutcomeStatus

STALLED_SHOWN_FOR = timedelta(hours=24)
_SHOWN = 10
# These defer a repository, which is no failure, but it stays deferred until its source is mended.
_UNFETCHED = (SourceUnreachable.code, SourceTimeout.code)


def stalled_runs() -> list[TenantRun]:
    """Runs whose circuit opened within the last day, newest first, each with `spared`: its spared outcomes."""
    spared = RepositoryOutcome.objects.filter(error_code=codes.CIRCUIT_OPEN).select_related("repository")
    return list(
        run_facts.runs()
        .filter(circuit__state=CircuitState.OPEN, circuit__opened_at__gte=Now() - STALLED_SHOWN_FOR)
        .prefetch_related(Prefetch("outcomes", queryset=spared, to_attr="spared"))[:_SHOWN]
    )


def unfinished_runs() -> list[TenantRun]:
    """Unfinished runs, newest first."""
    return list(run_facts.runs().filter(status__in=RUN_UNFINISHED)[:_SHOWN])


def troubled_repositories() -> list[Repository]:
    """Enabled repositories that fail repeatedly or whose source could not be fetched last time, worst first."""
    unfetched = Q(last__status=OutcomeStatus.DEFERRED, last__error_code__in=_UNFETCHED)
    failing = facts.repositories().filter(Q(consecutive_failures__gt=0) | unfetched, enabled=True)
    return list(failing.order_by("-consecutive_failures", "tenant__slug", "slug")[:_SHOWN])


def due_next() -> list[Repository]:
    """Enabled repositories in the order in which the schedule takes them."""
    due = facts.repositories().filter(enabled=True, tenant__is_active=True, next_due_at__isnull=False)
    return list(due.order_by("next_due_at", "pk")[:_SHOWN])


def providers() -> Sequence[Any]:
    """All providers, with their queued and dispatched tasks."""
    return list(facts.providers())


def next_step() -> str:
    """The next step of the setup; empty when it is complete."""
    steps = (
        (
            Provider.objects.exclude(embedding_model=""),
            "Add a provider: the model server that embeds your repositories.",
        ),
        (Tenant.objects.filter(is_active=True), "Add a tenant: the owner of repositories."),
        (Repository.objects.filter(removed_at=None), "Add a git repository to a tenant."),
        (TenantRun.objects.all(), "Sweep: tick repositories in their list and choose \u201cSweep now\u201d."),
    )
    return next((text for rows, text in steps if not rows.exists()), "")
