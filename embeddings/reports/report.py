"""What a run did, as one object: the shape that `sweep --json` and `runs show --json` print."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from embeddings.models import RepositoryOutcome, TenantRun

_COUNTS = ("provider_calls", "files", "rows", "embedded", "reused", "pending", "deleted", "undeliverable")


def report(run: TenantRun) -> dict[str, Any]:
    """The run, its circuit, and every outcome (docs/architecture.md, Commands)."""
    outcomes = list(run.outcomes.order_by("pk"))
    circuit = run.circuit
    return {
        "id": str(run.public_id),
        "provider": run.provider.name,
        "status": run.status,
        "circuit": {
            "state": circuit.state,
            "reason_code": circuit.reason_code,
            "source_error_code": circuit.source_error_code,
            "opened_by": circuit.opened_by,
        },
        "provider_calls": sum(outcome.provider_calls for outcome in outcomes),
        "outcomes": [outcome_report(outcome) for outcome in outcomes],
    }


def outcome_report(outcome: RepositoryOutcome) -> dict[str, Any]:
    """One outcome; `seconds` runs from the start of its scan to its decision."""
    return {
        "tenant": outcome.tenant_slug,
        "repository": outcome.repository_slug,
        "status": outcome.status,
        "error_code": outcome.error_code,
        "source_error_code": outcome.source_error_code,
        "error_detail": outcome.error_detail,
        **{name: getattr(outcome, name) for name in _COUNTS},
        "skipped": outcome.skipped,
        "seconds": _seconds(outcome),
    }


def _seconds(outcome: RepositoryOutcome) -> float:
    if outcome.started_at is None:
        return 0.0
    return round(((outcome.finished_at or timezone.now()) - outcome.started_at).total_seconds(), 3)
