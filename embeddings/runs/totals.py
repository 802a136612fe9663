"""What follows from a decided outcome: its totals, and when its repository is due again (docs/architecture.md, Sweep).

It follows outside the decision's transaction: one that opens a circuit decides many outcomes.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from django.db import transaction
from django.db.models import Count, Q
from django.db.models.functions import Now

from embeddings.knowledge import store
from embeddings.models import FileVersion, KnowledgeRow, Repository, RepositoryOutcome, TenantRun
from embeddings.states import OUTCOME_UNFINISHED, OutcomeStatus

BACKOFF_MAX = timedelta(hours=2)
_SUCCESS = (OutcomeStatus.SUCCEEDED, OutcomeStatus.UNCHANGED)


def record_decided(run: TenantRun) -> None:
    """Records each outcome of the run that is decided; one that succeeded makes its generation the repository's."""
    decided = run.outcomes.filter(is_recorded=False).exclude(status__in=OUTCOME_UNFINISHED)
    for outcome in decided.select_related("repository", "run"):
        if outcome.status in _SUCCESS:
            store.promote_generation(outcome.repository, run.generation_id)
        record(outcome)


def record(outcome: RepositoryOutcome) -> None:
    """Writes a decided outcome's totals and when its repository is due again; idempotent."""
    repository = outcome.repository
    failures = 0
    if outcome.status not in _SUCCESS:
        failed = outcome.status in (OutcomeStatus.FAILED, OutcomeStatus.INTERRUPTED)
        failures = repository.consecutive_failures + failed
    totals = _totals(outcome)
    with transaction.atomic():
        recorded = RepositoryOutcome.objects.filter(pk=outcome.pk, is_recorded=False).update(is_recorded=True, **totals)
        if not recorded or outcome.status == OutcomeStatus.SKIPPED:
            return
        changes: dict[str, object] = {
            "consecutive_failures": failures,
            "next_due_at": Now() + due_in(repository, failures),
        }
        if outcome.status in _SUCCESS:
            changes["indexed_revision"] = outcome.revision
        Repository.objects.filter(pk=repository.pk).update(**changes)


def recount(outcome: RepositoryOutcome) -> None:
    """Writes the totals of a recorded outcome anew; its decision stands."""
    RepositoryOutcome.objects.filter(pk=outcome.pk, is_recorded=True).update(**_totals(outcome))


def due_in(repository: Repository, failures: int) -> timedelta:
    """After how long the schedule takes the repository again: its cadence, doubled by each failure, plus up to a tenth.

    The addition is the same each time for one repository, and spreads the repositories of one cadence.
    """
    cadence = timedelta(minutes=repository.cadence_minutes)
    if failures:
        cadence = max(cadence, min(cadence * 2 ** min(failures, 10), BACKOFF_MAX))
    digest = hashlib.blake2b(f"repository {repository.pk}".encode(), digest_size=2).digest()
    return cadence * (1 + int.from_bytes(digest) / 65535 / 10)


def _totals(outcome: RepositoryOutcome) -> dict[str, object]:
    generation = outcome.run.generation_id
    rows = KnowledgeRow.objects.filter(repository=outcome.repository_id, generation=generation)
    counted = rows.aggregate(
        rows=Count("pk"),
        pending=Count("pk", filter=store.PENDING),
        undeliverable=Count("pk", filter=~Q(undeliverable_reason="")),
    )
    versions = FileVersion.objects.filter(file__repository=outcome.repository_id, generation=generation)
    skipped = versions.exclude(skipped_reason="").values_list("skipped_reason").annotate(n=Count("pk"))
    files = versions.filter(skipped_reason="").values("file").distinct().count()
    return {**counted, "files": files, "skipped": {**outcome.skipped, **dict(skipped.order_by("skipped_reason"))}}
