"""Runs and outcomes as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embeddings.management.rendering import Table
from embeddings.reports.facts import moment
from embeddings.reports.run_facts import short_id

_COUNTS = ("files", "rows", "embedded", "reused", "pending", "deleted", "undeliverable")


def outcome_table(outcomes: Sequence[dict[str, Any]]) -> Table:
    """One row per outcome of `run_facts.report`."""
    return Table(
        columns=("repository", "outcome", *_COUNTS, "skipped", "calls", "seconds", "reason"),
        rows=[
            (
                f"{one['tenant']}/{one['repository']}",
                one["status"],
                *(str(one[count]) for count in _COUNTS),
                str(sum(one["skipped"].values())),
                str(one["provider_calls"]),
                f"{one['seconds']:.1f}",
                " < ".join(code for code in (one["error_code"], one["source_error_code"]) if code),
            )
            for one in outcomes
        ],
        numbers=frozenset({*_COUNTS, "skipped", "calls", "seconds"}),
        empty="This run has no outcome.",
        if_any=frozenset({"reused", "pending", "deleted", "undeliverable", "skipped", "reason"}),
    )


def run_table(runs: Sequence[Any]) -> Table:
    """One row per run of `run_facts.runs()`."""
    return Table(
        columns=(
            "run",
            "provider",
            "status",
            "circuit",
            "repositories",
            "spared",
            "failed",
            "trigger",
            "created",
            "ended",
        ),
        rows=[
            (
                short_id(run),
                run.provider.name,
                "cancelling" if run.cancel_requested_at and run.finished_at is None else run.status,
                run.circuit.state,
                str(run.outcome_count),
                str(run.spared_count),
                str(run.failed_count),
                run.trigger,
                moment(run.created_at),
                moment(run.finished_at) or "-",
            )
            for run in runs
        ],
        numbers=frozenset({"repositories", "spared", "failed"}),
        empty="No run yet. Start one: manage.py sweep",
    )
