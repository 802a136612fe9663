"""Purging: what has been removed, and facts past their retention; nothing that is still at work."""

import contextlib
import subprocess
import sys
from datetime import timedelta

import pytest
from django.utils import timezone

from embeddings import registry
from embeddings.models import (
    EmbeddingTask,
    KnowledgeRow,
    Repository,
    RepositoryOutcome,
    RunCircuit,
    SourceFile,
    TenantRun,
)
from embeddings.runs import retention, scan
from embeddings.states import OutcomeStatus, RunStatus, TaskPriority, TaskState
from tests.support.factories import (
    make_generation,
    make_outcome,
    make_provider,
    make_repository,
    make_row,
    make_run,
    make_task,
    make_version,
)

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]

LONG_AGO = timezone.now() - timedelta(days=400)


def finished(**values):
    return make_run(status=RunStatus.COMPLETED, finished_at=LONG_AGO, **values)


def lock_of(repository):
    mirror = scan.mirror_directory(repository)
    return mirror.with_name(f"{mirror.name}.lock")


@contextlib.contextmanager
def held_elsewhere(path):
    """The lock, in a process of its own."""
    program = "import fcntl, sys; lock = open(sys.argv[1]); fcntl.flock(lock, fcntl.LOCK_EX); print(); sys.stdin.read()"
    command = [sys.executable, "-u", "-c", program, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        yield
        holder.stdin.close()


class TestTasks:
    def test_settled_ones_past_their_retention_go(self):
        outcome = make_outcome(make_run())
        old = make_task(outcome, state=TaskState.STORED, settled_at=LONG_AGO)
        kept = [
            make_task(outcome, state=TaskState.STORED, settled_at=timezone.now()),
            make_task(outcome),
            make_task(outcome, state=TaskState.REMOVED, settled_at=LONG_AGO, slot=0),
        ]
        assert retention.purge_tasks(timezone.now() - timedelta(days=30)) == 1
        assert set(EmbeddingTask.objects.all()) == set(kept)
        assert old not in kept

    def test_an_interactive_callers_texts_go_within_the_hour(self):
        provider = make_provider()
        facts = {"provider": provider, "generation": make_generation(provider), "priority": TaskPriority.INTERACTIVE}
        now = timezone.now()
        EmbeddingTask.objects.create(**facts, state=TaskState.STORED, settled_at=now - timedelta(minutes=61))
        EmbeddingTask.objects.create(**facts, state=TaskState.STORED, settled_at=now - timedelta(minutes=59))
        assert retention.purge_tasks(now - timedelta(days=30)) == 1

    def test_one_round_keeps_up_with_more_than_one_batch(self, monkeypatch):
        monkeypatch.setattr(retention, "_BATCH", 2)
        outcome = make_outcome(make_run())
        for _ in range(5):
            make_task(outcome, state=TaskState.STORED, settled_at=LONG_AGO)
        retention.purge()
        assert not EmbeddingTask.objects.exists()

    def test_rows_outlive_the_task_that_embedded_them(self):
        outcome = make_outcome(make_run())
        task = make_task(outcome, state=TaskState.STORED, settled_at=LONG_AGO)
        row = make_row(make_version(outcome.repository, outcome.run.generation), task=task)
        retention.purge()
        row.refresh_from_db()
        assert row.task_id is None


class TestRuns:
    def test_past_their_retention_go_with_their_outcomes(self):
        make_outcome(finished(), status=OutcomeStatus.SUCCEEDED)
        make_run(status=RunStatus.COMPLETED, finished_at=timezone.now())
        make_run()
        retention.purge()
        assert (TenantRun.objects.count(), RunCircuit.objects.count(), RepositoryOutcome.objects.count()) == (2, 2, 0)

    def test_not_while_a_task_of_theirs_is_left(self):
        outcome = make_outcome(finished(), status=OutcomeStatus.SUCCEEDED)
        make_task(outcome, state=TaskState.STORED, settled_at=timezone.now())
        retention.purge()
        assert TenantRun.objects.count() == 1


class TestRepositories:
    @pytest.fixture
    def removed(self):
        repository = make_repository()
        make_row(make_version(repository, make_generation(repository.tenant.embedding_provider)))
        mirror = scan.mirror_directory(repository)
        # A repository of an earlier test may have had this primary key, and left a mirror.
        mirror.mkdir(parents=True, exist_ok=True)
        lock_of(repository).touch()
        registry.remove_repository(repository)
        return repository

    def test_a_removed_one_goes_with_rows_and_mirror(self, removed):
        retention.purge()
        assert (Repository.objects.count(), SourceFile.objects.count(), KnowledgeRow.objects.count()) == (0, 0, 0)
        assert not scan.mirror_directory(removed).exists()
        assert not lock_of(removed).exists()

    def test_a_mirror_that_another_process_still_fetches_into_stays_until_that_has_ended(self, removed):
        with held_elsewhere(lock_of(removed)):
            assert not retention.purge_repository(removed)
            assert (scan.mirror_directory(removed).exists(), lock_of(removed).exists()) == (True, True)
            assert Repository.objects.exists()
        assert retention.purge_repository(removed)
        assert (scan.mirror_directory(removed).exists(), lock_of(removed).exists()) == (False, False)

    def test_the_repository_itself_stays_while_a_fact_speaks_of_it(self, removed):
        make_outcome(make_run(), removed, status=OutcomeStatus.SUCCEEDED)
        retention.purge()
        assert (Repository.objects.count(), KnowledgeRow.objects.count()) == (1, 0)

    def test_nothing_goes_while_something_of_it_is_at_work(self, removed):
        run = make_run(removed.tenant.embedding_provider)
        outcome = make_outcome(run, removed)
        assert not retention.purge_repository(removed)
        RepositoryOutcome.objects.update(status=OutcomeStatus.CANCELLED)
        task = make_task(outcome, state=TaskState.REMOVED, settled_at=timezone.now(), slot=0)
        assert not retention.purge_repository(removed)
        EmbeddingTask.objects.filter(pk=task.pk).update(slot=None)
        assert retention.purge_repository(removed)

    def test_another_tenants_of_the_same_slug_and_paths_stays(self, removed):
        other = make_repository(slug=removed.slug)
        make_row(make_version(other, make_generation(other.tenant.embedding_provider)))
        retention.purge()
        assert list(KnowledgeRow.objects.values_list("repository", flat=True)) == [other.pk]
