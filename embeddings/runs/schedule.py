"""The schedule: which repositories are due, and one run over all that are."""

from __future__ import annotations

from django.db.models import Q, QuerySet
from django.utils import timezone

from embeddings.models import Provider, Repository, TenantRun
from embeddings.runs import orphaned_runs, sweep
from embeddings.states import RUN_UNFINISHED, RunTrigger


def start_due() -> list[TenantRun]:
    """Starts one run per provider over everything due, unless a scheduled run of that provider is still unfinished.

    None where others are at work on all that is due: it would skip them, and be started again at every look.

    One run takes all that are due: otherwise jitter would give each repository a run, and a circuit, of its own.
    """
    runs: list[TenantRun] = []
    for provider in Provider.objects.filter(is_paused=False).exclude(embedding_model=""):
        unfinished = TenantRun.objects.filter(provider=provider, trigger=RunTrigger.SCHEDULE, status__in=RUN_UNFINISHED)
        due = list(due_repositories(provider))
        if due and not unfinished.exists() and len(orphaned_runs.at_work_on(due)) < len(due):
            runs += sweep.start(due, trigger=RunTrigger.SCHEDULE)
    return runs


def due_repositories(provider: Provider) -> QuerySet[Repository]:
    """Enabled repositories of active tenants on this provider whose time has come, or who were never swept."""
    return (
        sweepable()
        .filter(Q(next_due_at=None) | Q(next_due_at__lte=timezone.now()), tenant__embedding_provider=provider)
        .order_by("next_due_at", "pk")
    )


def sweepable() -> QuerySet[Repository]:
    """Every repository that a sweep may take."""
    return Repository.objects.filter(enabled=True, removed_at=None, tenant__is_active=True).select_related(
        "tenant__embedding_provider"
    )
