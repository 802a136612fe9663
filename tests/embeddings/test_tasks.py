"""Celery's entry points: a lost message loses nothing, a duplicate does nothing, one run's trouble is not another's."""

import pytest

from embeddings import tasks
from embeddings.models import RepositoryOutcome
from embeddings.runs import sweep
from embeddings.states import OutcomeStatus, RunStatus
from tests.support.sweeps import outcome_of, texts

pytestmark = pytest.mark.both_databases


def test_doors_of_what_has_gone_do_nothing(transactional_db):
    for work in (sweep.drain, tasks.scan_all, tasks.advance_one):
        work(10**9)


def test_duplicates_do_nothing(stage):
    a = stage.repository("a", *texts("alpha", 6))
    run = stage.start(a)
    for _ in range(2):
        tasks.scan_all(run.pk)
        sweep.drain(stage.provider.pk)
        tasks.advance_one(run.pk)
    assert outcome_of(run, a).status == OutcomeStatus.SUCCEEDED
    assert set(stage.server.texts_seen.values()) == {1}


def test_beats_round_goes_on_past_a_run_that_cannot_be_advanced(stage, monkeypatch):
    broken, fine = stage.start(stage.repository("a", "alpha")), stage.start(stage.repository("b", "beta"))
    real = sweep.advance

    def advance(run_id, **options):
        if run_id == broken.pk:
            raise LookupError("broken")
        return real(run_id, **options)

    monkeypatch.setattr(sweep, "advance", advance)
    RepositoryOutcome.objects.filter(run=fine).update(status=OutcomeStatus.CANCELLED)
    tasks.go_round()
    fine.refresh_from_db()
    assert fine.status == RunStatus.CANCELLED
