"""Facts about runs, outcomes and undeliverable rows for the commands, the API and the admin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from embeddings import codes
from embeddings.errors import UsageError
from embeddings.knowledge.store import PENDING
from embeddings.models import KnowledgeRow, Repository, RepositoryOutcome, TenantRun
from embeddings.states import OUTCOME_UNFINISHED, CircuitState, OutcomeStatus

_FAILED = (OutcomeStatus.FAILED, OutcomeStatus.INTERRUPTED)
_COUNTS = ("provider_calls", "files", "rows", "embedded", "reused", "pending", "deleted", "undeliverable")
_NOT_DONE = (OutcomeStatus.DEFERRED, OutcomeStatus.SKIPPED, OutcomeStatus.CANCELLED)


def runs() -> QuerySet[TenantRun]:
    """Newest first, each with its circuit, provider and counts of outcomes.

    `outcome_count`, `unfinished_count`, `spared_count` (deferred by the open circuit) and `failed_count`.
    """
    unfinished, failed = Q(outcomes__status__in=OUTCOME_UNFINISHED), Q(outcomes__status__in=_FAILED)
    return (
        TenantRun.objects.select_related("provider", "circuit")
        .annotate(
            outcome_count=Count("outcomes"),
            unfinished_count=Count("outcomes", filter=unfinished),
            spared_count=Count("outcomes", filter=Q(outcomes__error_code=codes.CIRCUIT_OPEN)),
            failed_count=Count("outcomes", filter=failed),
        )
        .order_by("-pk")
    )


def find_run(text: str) -> TenantRun:
    """The run whose public id begins with `text`. Raises UsageError if none does, or more than one."""
    wanted = text.strip().lower()
    is_id_start = bool(wanted) and set(wanted) <= set("0123456789abcdef-")
    found = list(runs().filter(public_id__startswith=wanted)[:2]) if is_id_start else []
    if not found:
        raise UsageError(f"There is no run {text!r}: `manage.py runs list` shows the newest.")
    if len(found) > 1:
        raise UsageError(f"More than one run begins with {text!r}: give more of its id.")
    return found[0]


def find_outcome(run: TenantRun, name: str) -> RepositoryOutcome:
    """The run's outcome for `tenant/repository`. Raises UsageError."""
    outcomes = {str(outcome): outcome for outcome in run.outcomes.all()}
    if name not in outcomes:
        raise UsageError(f"Run {short_id(run)} has no repository {name!r}. There is: {', '.join(sorted(outcomes))}.")
    return outcomes[name]


def short_id(run: TenantRun) -> str:
    """The first eight characters of the public id."""
    return str(run.public_id)[:8]


def run_facts(run: Any) -> dict[str, Any]:
    """One of `runs()` for the `--json` of a list."""
    return {
        "id": str(run.public_id),
        "provider": run.provider.name,
        "status": run.status,
        "trigger": run.trigger,
        "circuit": {"state": run.circuit.state, "opened_by": run.circuit.opened_by or None},
        "outcomes": run.outcome_count,
        "unfinished": run.unfinished_count,
        "spared": run.spared_count,
        "failed": run.failed_count,
        "created_at": run.created_at,
        "started_at": run.started_at,
        "finished_at": run.finished_at,
    }


def report(run: TenantRun) -> dict[str, Any]:
    """`sweep --json` and `runs show --json`: the run, its circuit, and every outcome (docs/architecture.md, Commands)."""
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
        "seconds": round(_elapsed_s(outcome) or 0.0, 3),
    }


def exit_status(statuses: Iterable[str]) -> int:
    """1 if any outcome failed or was interrupted; else 3 if any was deferred, skipped or cancelled; else 0."""
    counted = Counter(statuses)
    if any(counted[status] for status in _FAILED):
        return 1
    return 3 if any(counted[status] for status in _NOT_DONE) else 0


def circuit_story(run: TenantRun) -> str:
    """One line about an open circuit: the repository that timed out and the number spared; empty while closed."""
    circuit = run.circuit
    if circuit.state != CircuitState.OPEN:
        return ""
    spared = run.outcomes.filter(error_code=codes.CIRCUIT_OPEN).count()
    return (
        f"Provider {run.provider} timed out on {circuit.opened_by} ({circuit.source_error_code}); "
        f"{spared} further repositories were spared and are taken by the next sweep."
    )


@dataclass(frozen=True)
class Progress:
    """The current state of one repository of a run; `embedded` of `total` rows, both 0 while its files are read."""

    name: str
    status: str
    error_code: str
    embedded: int
    total: int
    finished: bool


def progress(runs: Sequence[TenantRun]) -> list[Progress]:
    """Every repository of these runs, in two queries; pending rows are counted only of those that are embedding."""
    outcomes = list(RepositoryOutcome.objects.filter(run__in=runs).order_by("tenant_slug", "repository_slug"))
    embedding = [outcome.repository_id for outcome in outcomes if outcome.status == OutcomeStatus.EMBEDDING]
    generations = {run.generation_id for run in runs}
    pending = KnowledgeRow.objects.filter(PENDING, repository__in=embedding, generation__in=generations)
    waiting = dict(pending.values_list("repository").annotate(Count("pk")).order_by()) if embedding else {}
    return [
        Progress(
            name=str(outcome),
            status=outcome.status,
            error_code=outcome.error_code,
            embedded=outcome.embedded,
            total=outcome.embedded + waiting.get(outcome.repository_id, 0),
            finished=outcome.status not in OUTCOME_UNFINISHED,
        )
        for outcome in outcomes
    ]


def undeliverable_rows(repositories: Iterable[Repository]) -> QuerySet[KnowledgeRow]:
    """The rows of these repositories whose text the provider refuses, with their paths."""
    return (
        KnowledgeRow.objects.filter(repository__in=list(repositories))
        .exclude(undeliverable_reason="")
        .select_related("repository__tenant", "version__file")
        .order_by("repository__tenant__slug", "repository__slug", "version__file__path", "ordinal")
    )


def row_facts(row: KnowledgeRow) -> dict[str, Any]:
    """One undeliverable row for `--json`."""
    return {
        "tenant": row.repository.tenant.slug,
        "repository": row.repository.slug,
        "path": row.version.file.path,
        "start_line": row.start_line,
        "end_line": row.end_line,
        "reason": row.undeliverable_reason,
        "text": row.text,
    }


def seconds_of(run: TenantRun) -> float | None:
    """The duration of the run, so far if unfinished; None before it started."""
    elapsed = _elapsed_s(run)
    return None if elapsed is None else round(elapsed, 1)


def reason(outcome: RepositoryOutcome) -> str:
    """The outcome's error code, and the provider's own code after it; empty for a success."""
    return " < ".join(code for code in (outcome.error_code, outcome.source_error_code) if code)


def outcome_seconds(outcome: RepositoryOutcome) -> str:
    """The duration of the outcome, so far if unfinished; a dash before its scan."""
    elapsed = _elapsed_s(outcome)
    return "-" if elapsed is None else f"{elapsed:.1f}"


def _elapsed_s(row: TenantRun | RepositoryOutcome) -> float | None:
    """Seconds from the row's start to its end, or to now; None before it started."""
    if row.started_at is None:
        return None
    return ((row.finished_at or timezone.now()) - row.started_at).total_seconds()
