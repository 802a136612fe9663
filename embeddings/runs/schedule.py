"""The schedule: which repositories are due, and one run over all that are."""

from __future__ import annotations

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from embeddings.models import Provider, Repository, TenantRun
from embeddings.runs import orphaned_runs, sweep
from embeddings.states import RUN_UNFINISHED, RunTrigger


def start_due() -> list[TenantRun]:
    """Starts one run for each provider over all its repositories that are due, unless its last scheduled run is unfinished.

    One run takes all that are due: otherwise each repository would get a run, and a circuit, of its own. No run is started
    where other runs are at work on all that is due: it could only skip them, at every round of beat.
    """
    runs: list[TenantRun] = []
    for provider in Provider.objects.filter(is_paused=False).exclude(embedding_model=""):
        unfinished = TenantRun.objects.filter(provider=provider, trigger=RunTrigger.SCHEDULE, status__in=RUN_UNFINISHED)
        due = list(due_repositories(provider))
        if due and not unfinished.exists() and len(orphaned_runs.busy_repositories(due)) < len(due):
            runs += sweep.start(due, trigger=RunTrigger.SCHEDULE)
    return runs


def due_repositories(provider: Provider) -> QuerySet[Repository]:
    """Enabled repositories of active tenants on this provider that are due, or were never swept."""
    return (
        sweepable()
        .filter(Q(next_due_at=None) | Q(next_due_at__lte=Now()), tenant__embedding_provider=provider)
        .order_by("next_due_at", "pk")
    )


def sweepable() -> QuerySet[Repository]:
    """Every repository that a sweep may take: enabled, not removed, of an active tenant."""
    return Repository.objects.filter(enabled=True, removed_at=None, tenant__is_active=True).select_related(
        "tenant__embedding_provider"
    )
