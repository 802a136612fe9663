"""Deletes removed repositories once nothing of theirs is at a provider, and facts past their retention."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db.models.functions import Now

from embeddings.knowledge import store
from embeddings.knowledge.source import remove_mirror
from embeddings.models import EmbeddingTask, Repository, RepositoryOutcome, SourceFile, TenantRun
from embeddings.runs import scan
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED, TaskPriority

_BATCH = 1_000
# More tasks than searches and batches leave behind in an hour, the interval of the rounds.
_TASKS_MAX = 200_000
INTERACTIVE_KEPT = timedelta(hours=1)


def purge() -> None:
    """One round; each part is bounded, and the next round goes on."""
    old = Now() - timedelta(days=settings.RETENTION_DAYS)
    purge_tasks(old)
    purge_runs(old)
    for repository in Repository.objects.exclude(removed_at=None):
        purge_repository(repository)


def purge_tasks(old: object) -> int:
    """Deletes settled tasks past their retention, interactive ones within the hour. Returns how many."""
    gone = 0
    rules = (
        (TaskPriority.BATCH, old),
        (TaskPriority.INTERACTIVE, old),
        (TaskPriority.INTERACTIVE, Now() - INTERACTIVE_KEPT),
    )
    for priority, before in rules:
        settled = EmbeddingTask.objects.filter(priority=priority, settled_at__lt=before, slot=None)
        oldest = settled.order_by("settled_at").values_list("pk", flat=True)
        while gone < _TASKS_MAX and (some := list(oldest[:_BATCH])):
            gone += EmbeddingTask.objects.filter(pk__in=some).delete()[0]
    return gone


def purge_runs(old: object) -> None:
    """Deletes finished runs past their retention, with their outcomes, once none of their tasks is left."""
    finished = TenantRun.objects.filter(finished_at__lt=old).exclude(status__in=RUN_UNFINISHED)
    for run in finished.exclude(tasks__isnull=False).distinct()[:_BATCH]:
        run.outcomes.all().delete()
        run.delete()


def purge_repository(repository: Repository) -> bool:
    """Deletes a removed repository's rows and mirror, and itself once no outcome refers to it. False while it is at work."""
    if RepositoryOutcome.objects.filter(repository=repository, status__in=OUTCOME_UNFINISHED).exists():
        return False
    if EmbeddingTask.objects.filter(outcome__repository=repository).exclude(slot=None).exists():
        return False
    files = list(SourceFile.objects.filter(repository=repository).values_list("pk", flat=True))
    store.delete_files(repository.pk, files)
    if not remove_mirror(scan.mirror_directory(repository)):
        return False
    if not RepositoryOutcome.objects.filter(repository=repository).exists():
        repository.delete()
    return True
