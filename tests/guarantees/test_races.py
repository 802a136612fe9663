"""Races: putting, opening and admitting at once, and a short soak with two worker processes."""

import random
import threading

import pytest
from django.db import connection

from embeddings import tasks
from embeddings.dispatch import batches, task_queue
from embeddings.errors import DispatchNotAllowed
from embeddings.models import EmbeddingTask, KnowledgeRow, RepositoryOutcome, TenantRun
from embeddings.runs import circuit, sweep
from embeddings.states import RUN_UNFINISHED, OutcomeStatus, TaskState
from tests.support.factories import make_outcome, make_row, make_run, make_version
from tests.support.provider_server import close_without_answer, delay, hang, status
from tests.support.sweeps import TimedOut, live_texts, texts
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases

ROUNDS = 12


def scene():
    """A run of four outcomes with rows of their own, the first one's task at the provider."""
    run = make_run(provider=None)
    type(run.provider).objects.filter(pk=run.provider_id).update(batch_size=1)
    outcomes = [make_outcome(run, status=OutcomeStatus.EMBEDDING) for _ in range(4)]
    for outcome in outcomes:
        version = make_version(outcome.repository, run.generation)
        for _ in range(3):
            make_row(version)
    loaded = list(
        RepositoryOutcome.objects.select_related("repository", "run__provider").filter(run=run).order_by("pk")
    )
    batches.refill(loaded[0])
    return run, loaded, task_queue.admit(run.provider_id, lambda cap: 1, "fair")


def put(outcome):
    for _ in range(4):
        try:
            batches.refill(outcome)
        except DispatchNotAllowed:
            return


def admit(run, admitted):
    for _ in range(4):
        if task := task_queue.admit(run.provider_id, lambda cap: 4, "fair"):
            admitted.append(task)


def at_once(*works):
    """Each in a thread of its own, started together in a random order; raises what any of them did."""
    errors = []
    together = threading.Barrier(len(works))

    def guarded(work):
        try:
            together.wait(10)
            work()
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=guarded, args=(work,)) for work in random.sample(works, len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []


def test_putting_opening_and_admitting_at_once(transactional_db):
    """Whatever the order: once the circuit is open nothing is queued, and who has nothing at the provider is decided."""
    for _ in range(ROUNDS):
        run, outcomes, of_a = scene()
        admitted = []
        at_once(
            lambda of_a=of_a: circuit.open_for(of_a, TimedOut()),
            *(lambda outcome=outcome: put(outcome) for outcome in outcomes[1:]),
            *(lambda run=run, admitted=admitted: admit(run, admitted) for _ in range(2)),
        )
        assert not TenantRun.objects.get(pk=run.pk).dispatch_allowed
        assert not EmbeddingTask.objects.filter(run=run, state=TaskState.QUEUED).exists()
        assert task_queue.admit(run.provider_id, lambda cap: 99, "fair") is None
        out = {task.outcome_id for task in admitted}
        for outcome in RepositoryOutcome.objects.filter(run=run).exclude(pk=of_a.outcome_id):
            assert outcome.status == (OutcomeStatus.EMBEDDING if outcome.pk in out else OutcomeStatus.DEFERRED)


def test_cancelling_settling_and_storing_at_once(transactional_db):
    """Locks are taken in one order: nobody is told of a deadlock."""
    for _ in range(ROUNDS):
        run, outcomes, of_a = scene()
        for outcome in outcomes[1:]:
            batches.refill(outcome)

        at_once(
            lambda of_a=of_a: task_queue.settle_and_admit(of_a, lambda cap: 1, "fair"),
            lambda run=run: sweep.request_cancel(run),
            lambda run=run: task_queue.reclaim(run.provider_id),
            lambda run=run: sweep.advance(run.pk),
        )
        assert not EmbeddingTask.objects.filter(run=run, state=TaskState.QUEUED).exists()
        assert set(run.outcomes.values_list("status", flat=True)) == {OutcomeStatus.CANCELLED}


def over(run):
    """Whether the run is, after a round of beat's: bells are lost now and then, and the rows are looked at."""
    tasks.go_round()
    run.refresh_from_db()
    return run.status not in RUN_UNFINISHED


def test_a_short_soak(stage, fleet):
    """Two workers, a server in every mood, sweep after sweep: one call at a time, and in the end every row once."""
    moods = random.Random(7)
    replies = [
        None,
        None,
        None,
        delay(0.05),
        status(500),
        status(429, headers={"Retry-After": "0"}),
        status(401),
        close_without_answer(),
        hang(),
    ]
    repositories = [stage.repository(slug, *texts(slug * 3, 12)) for slug in "abc"]
    stage.server.script(lambda call: moods.choice(replies))
    fleet.start(2)
    for turn in range(5):
        run = stage.start(*repositories, concurrency=3)
        eventually(lambda run=run: over(run), 30, 0.5, "the run finishes")
        stage.git["abc"[turn % 3]].commit({"000.txt": f"turn {turn}"})
    stage.server.clear_script()
    run = stage.start(*repositories, concurrency=3)
    eventually(lambda: over(run), 30, 0.5, "the last run finishes")
    assert stage.server.peak_in_flight == 1
    assert not EmbeddingTask.objects.exclude(slot=None).exists()
    for repository in repositories:
        assert len(live_texts(repository)) == KnowledgeRow.objects.filter(repository=repository).count() == 12
    assert not KnowledgeRow.objects.filter(vector=None, undeliverable_reason="").exists()
