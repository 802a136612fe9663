"""A tenant's view of runs, which it may share with other tenants of its provider (docs/architecture.md, Chat, Endpoints).

It shows the tenant's own outcomes and the circuit's state and code, but not the number of the other tenants' outcomes or
the repository that opened the circuit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from embeddings.models import RepositoryOutcome, Tenant, TenantRun
from embeddings.registry import select_repositories
from embeddings.registry.access import NotFound
from embeddings.reports.run_facts import outcome_report
from embeddings.runs import sweep, transitions
from embeddings.states import OUTCOME_UNFINISHED, RunStatus, RunTrigger


def newest(tenant: Tenant, limit: int) -> list[dict[str, Any]]:
    """The runs with an outcome of the tenant, newest first."""
    return [_view(tenant, run) for run in _runs(tenant).order_by("-pk")[:limit]]


def show(tenant: Tenant, run_id: UUID) -> dict[str, Any]:
    """The tenant's part of the run. Raises NotFound."""
    return _view(tenant, _find(tenant, run_id))


def start(tenant: Tenant, slugs: Sequence[str], concurrency: int | None) -> list[dict[str, Any]]:
    """Starts a sweep over the tenant's repositories of these slugs, or all. Raises UsageError."""
    named = [f"{tenant.slug}/{slug}" for slug in slugs]
    chosen = select_repositories((), named) if named else select_repositories((tenant.slug,))
    # A slug with a slash could name another tenant's repository.
    own = [repository for repository in chosen if repository.tenant_id == tenant.pk]
    return [_view(tenant, run) for run in sweep.start(own, trigger=RunTrigger.API, concurrency=concurrency)]


def cancel(tenant: Tenant, run_id: UUID) -> dict[str, Any]:
    """Cancels the tenant's unfinished outcomes of the run. Raises NotFound."""
    run = _find(tenant, run_id)
    for outcome in _own(tenant, run).filter(status__in=OUTCOME_UNFINISHED):
        sweep.cancel_outcome(outcome)
    return _view(tenant, run)


def _runs(tenant: Tenant) -> QuerySet[TenantRun]:
    mine = RepositoryOutcome.objects.filter(repository__tenant=tenant).values("run")
    return TenantRun.objects.select_related("circuit", "provider").filter(pk__in=mine)


def _find(tenant: Tenant, run_id: UUID) -> TenantRun:
    found = _runs(tenant).filter(public_id=run_id).first()
    if found is None:
        raise NotFound("There is no such run.")
    return found


def _own(tenant: Tenant, run: TenantRun) -> QuerySet[RepositoryOutcome]:
    return RepositoryOutcome.objects.filter(run=run, repository__tenant=tenant).order_by("pk")


def _view(tenant: Tenant, run: TenantRun) -> dict[str, Any]:
    outcomes = list(_own(tenant, run))
    circuit = run.circuit
    # The status of the tenant's own part: the run's would reveal the other tenants' outcomes.
    statuses = {outcome.status for outcome in outcomes}
    if not statuses.intersection(OUTCOME_UNFINISHED):
        status = transitions.run_status(statuses, was_cancelled=False)
    else:
        status = RunStatus.QUEUED if run.status == RunStatus.QUEUED else RunStatus.RUNNING
    return {
        "id": str(run.public_id),
        "provider": run.provider.name,
        "status": status,
        "trigger": run.trigger,
        "created_at": run.created_at,
        "circuit": {
            "state": circuit.state,
            "reason_code": circuit.reason_code,
            "source_error_code": circuit.source_error_code,
        },
        "outcomes": [outcome_report(outcome) for outcome in outcomes],
    }
