"""The circuit's verbs: opened once by a task that is held, in one transaction that a locked database only delays."""

import pytest
from django.db import IntegrityError, OperationalError

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.models import EmbeddingTask, RepositoryOutcome, RunCircuit, TenantRun
from embeddings.runs import circuit
from embeddings.runtime import retry
from embeddings.states import CircuitState, OutcomeStatus, TaskState
from tests.support.factories import make_outcome, make_provider, make_run, make_task
from tests.support.sweeps import TimedOut

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]

S = OutcomeStatus


@pytest.fixture
def run():
    return make_run()


@pytest.fixture
def held(run):
    """A's task, held by the test; A has another one queued."""
    a = make_outcome(run, status=S.EMBEDDING)
    make_task(a), make_task(a)
    return task_queue.admit(run.provider_id, lambda cap: 1, "fair")


def circuit_of(run):
    return RunCircuit.objects.get(run=run)


class TestOpening:
    def test_decides_whoever_has_nothing_at_the_provider(self, run, held):
        waiting = {status: make_outcome(run, status=status) for status in (S.PENDING, S.EMBEDDING)}
        others = {status: make_outcome(run, status=status) for status in (S.SCANNING, S.SUCCEEDED, S.CANCELLED)}
        make_task(waiting[S.EMBEDDING])
        circuit.open_for(held, TimedOut("no reply"))
        for outcome in waiting.values():
            outcome.refresh_from_db()
            assert (outcome.status, outcome.error_code) == (S.DEFERRED, codes.CIRCUIT_OPEN)
            assert outcome.finished_at is not None
        for status, outcome in others.items():
            outcome.refresh_from_db()
            assert outcome.status == status
        assert not TenantRun.objects.get(pk=run.pk).dispatch_allowed

    def test_removes_the_runs_queued_tasks_its_openers_own_included(self, run, held):
        make_task(make_outcome(run, status=S.EMBEDDING))
        circuit.open_for(held, TimedOut())
        states = EmbeddingTask.objects.order_by("pk").values_list("state", "error_code")
        assert list(states) == [
            (TaskState.DISPATCHED, ""),
            (TaskState.REMOVED, codes.PROVIDER_TIMED_OUT),
            (TaskState.REMOVED, codes.CIRCUIT_OPEN),
        ]

    def test_leaves_another_run_of_the_provider_alone(self, run, held):
        other = make_outcome(make_run(run.provider), status=S.EMBEDDING)
        task = make_task(other)
        circuit.open_for(held, TimedOut())
        assert circuit_of(other.run).state == CircuitState.CLOSED
        task_queue.fail(held, "X", "")
        assert task_queue.admit(run.provider_id, lambda cap: 1, "fair").id == task.pk

    def test_says_what_why_and_who(self, run, held):
        circuit.open_for(held, TimedOut("no complete reply within 300 s"))
        found = circuit_of(run)
        assert (found.reason_code, found.source_error_code) == (codes.CIRCUIT_OPEN, TimedOut.code)
        assert (found.message, found.opened_at is None) == ("no complete reply within 300 s", False)
        assert found.opened_by == str(RepositoryOutcome.objects.get(pk=held.outcome_id))

    def test_by_a_holder_that_lost_its_task_does_nothing(self, run, held):
        EmbeddingTask.objects.filter(pk=held.id).update(lease_expires_at="2000-01-01T00:00Z")
        task_queue.reclaim(run.provider_id)
        circuit.open_for(held, TimedOut())
        assert circuit_of(run).state == CircuitState.CLOSED
        assert RepositoryOutcome.objects.get(pk=held.outcome_id).status == S.EMBEDDING

    def test_an_interactive_text_has_no_circuit_to_open(self):
        run = make_run(make_provider())
        task_queue.put_interactive(run.provider, run.generation, ["a"], 5_000)
        assert circuit.on_provider_timeout_for(task_queue.admit(run.provider_id, lambda cap: 1, "fair")) is None


class TestALockedDatabase:
    @pytest.fixture(autouse=True)
    def hasty(self, monkeypatch):
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)

    def test_only_delays_the_opening(self, run, held, monkeypatch):
        real, tries = circuit._open, []

        def locked_twice(*arguments):
            tries.append(1)
            if len(tries) < 3:
                raise OperationalError("database is locked")
            real(*arguments)

        monkeypatch.setattr(circuit, "_open", locked_twice)
        circuit.open_for(held, TimedOut())
        assert (len(tries), circuit_of(run).state) == (3, CircuitState.OPEN)

    def test_is_waited_for_within_a_bound(self):
        def locked():
            raise OperationalError("database is locked")

        with pytest.raises(OperationalError):
            retry.retry_on_database_error(locked, within_s=0.02)

    def test_another_error_is_raised_at_once(self):
        tries = []

        def refused():
            tries.append(1)
            raise IntegrityError("refused")

        with pytest.raises(IntegrityError):
            retry.retry_on_database_error(refused)
        assert len(tries) == 1
