"""The tables of the admin's overview page."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from embeddings.admin.parts import link
from embeddings.models import Repository
from embeddings.reports import facts, overview, run_facts
from embeddings.reports.facts import moment

Table = dict[str, Any]


def add_overview(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Unfold's dashboard callback: adds the overview for users who may see runs."""
    if not request.user.has_perm("embeddings.view_tenantrun"):
        return context
    return context | {
        "next_step": overview.next_step(),
        "stalled": _stalled(),
        "unfinished": _unfinished(),
        "providers": _providers(),
        "troubled": _troubled(),
        "due": _due(),
    }


def _stalled() -> Table:
    rows = [
        [
            link(run, run_facts.short_id(run)),
            moment(run.circuit.opened_at),
            run.provider.name,
            run.circuit.opened_by,
            run.circuit.source_error_code,
            ", ".join(str(outcome) for outcome in run.spared) or "none",  # type: ignore[attr-defined]  # a prefetch
        ]
        for run in overview.stalled_runs()
    ]
    return {"headers": ["run", "since", "provider", "stalled on", "with", "spared, swept next time"], "rows": rows}


def _unfinished() -> Table:
    rows = [
        [
            link(run, run_facts.short_id(run)),
            run.provider.name,
            run.status,
            f"{run.outcome_count - run.unfinished_count} of {run.outcome_count}",
            run.trigger,
            moment(run.created_at),
        ]
        for run in _any(overview.unfinished_runs())
    ]
    return {"headers": ["run", "provider", "status", "decided", "trigger", "created"], "rows": rows}


def _providers() -> Table:
    rows = [
        [link(one, one.name), facts.provider_state(one), one.queued, one.dispatched, facts.admission(one)]
        for one in overview.providers()
    ]
    return {"headers": ["provider", "state", "queued", "at the provider", "admission"], "rows": rows}


def _troubled() -> Table:
    rows = [
        [
            link(one, one),
            one.consecutive_failures,
            _last(one, "status"),
            _last(one, "error_code") or "-",
            moment(one.next_due_at) or "-",
        ]
        for one in overview.troubled_repositories()
    ]
    return {"headers": ["repository", "failures in a row", "last outcome", "reason", "tried next"], "rows": rows}


def _due() -> Table:
    rows = [
        [
            link(one, one),
            moment(one.next_due_at),
            _last(one, "status") or "never swept",
            _last(one, "error_code") or "-",
        ]
        for one in overview.due_next()
    ]
    return {"headers": ["repository", "due", "last outcome", "reason"], "rows": rows}


def _last(repository: Repository, fact: str) -> str:
    return str((_any(repository).last or {}).get(fact) or "")


def _any(rows: Any) -> Any:
    """The rows untyped: their classes do not declare the annotations."""
    return rows
