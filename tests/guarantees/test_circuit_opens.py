"""The guarantees that need no second process, each beside a twin that breaks its mechanism and sees the bad thing
(docs/architecture.md, Guarantees).
"""

import threading
from dataclasses import replace

import pytest
from django.db import connection, transaction

from embeddings import codes
from embeddings.dispatch import admission, batches, task_queue
from embeddings.errors import DispatchNotAllowed
from embeddings.models import EmbeddingTask, RepositoryOutcome, RunCircuit
from embeddings.runs import circuit, sweep, transitions
from embeddings.states import CircuitState, OutcomeStatus, RunStatus, TaskState
from embeddings.timeouts import OPENAI_COMPATIBLE_REQUEST_TIMEOUT
from tests.support.provider_server import containing, hang
from tests.support.sweeps import TimedOut, calls_with, codes_of, outcome_of, texts, two_dispatched

pytestmark = pytest.mark.both_databases

TIMED_OUT = (OutcomeStatus.DEFERRED, codes.PROVIDER_TIMED_OUT, OPENAI_COMPATIBLE_REQUEST_TIMEOUT)
SPARED = (OutcomeStatus.DEFERRED, codes.CIRCUIT_OPEN, "")


@pytest.fixture
def queued_pair(stage):
    """A and B of one run, both queued at one lane, A first; the server is silent for A."""
    a = stage.repository("a", *texts("alpha", 3))
    b = stage.repository("b", *texts("beta", 3))
    stage.server.when(containing("alpha"), hang())
    run = stage.start(a, b)
    stage.scan(run)
    order = EmbeddingTask.objects.order_by("pk").values_list("outcome__repository_slug", "state")
    assert list(order) == [("a", TaskState.QUEUED), ("b", TaskState.QUEUED)]
    return stage, run, outcome_of(run, a), outcome_of(run, b)


class TestG1OneNotificationServesTheLane:
    """G1; native Ollama's half stands with its admission."""

    def test_a_timeout_keeps_the_queued_repository_away(self, queued_pair):
        stage, run, _, _ = queued_pair
        stage.carry_out(run)
        assert calls_with(stage.server, "beta") == []

    def test_twin_a_finish_without_the_notification_dispatches_b(self, queued_pair, monkeypatch):
        stage, run, _, _ = queued_pair
        monkeypatch.setattr(admission, "notify_provider_timeout", lambda error, callback: False)
        stage.carry_out(run)
        assert len(calls_with(stage.server, "beta")) == 1


class TestG3EachKeepsItsOwnCode:
    def test_a_keeps_its_timeout_and_b_gets_the_circuits(self, queued_pair):
        stage, run, a, b = queued_pair
        stage.carry_out(run)
        a.refresh_from_db()
        b.refresh_from_db()
        assert (codes_of(a), codes_of(b)) == (TIMED_OUT, SPARED)
        assert (a.provider_calls, b.provider_calls) == (1, 0)
        assert run.status == RunStatus.DEFERRED

    def test_the_circuit_says_who_opened_it(self, queued_pair):
        stage, run, _, _ = queued_pair
        stage.carry_out(run)
        found = RunCircuit.objects.get(run=run)
        assert (found.state, found.reason_code) == (CircuitState.OPEN, codes.CIRCUIT_OPEN)
        assert (found.source_error_code, found.opened_by) == (OPENAI_COMPATIBLE_REQUEST_TIMEOUT, f"{stage.tenant}/a")

    def test_twin_an_opening_that_does_not_decide_a_first_gives_it_the_circuits_code(self, queued_pair, monkeypatch):
        stage, run, a, _ = queued_pair
        task = admission.policy_for(stage.provider).admit(stage.provider)
        monkeypatch.setattr(transitions, "decide", lambda *_, **__: False)
        circuit.open_for(task, TimedOut())
        # The task ends before anybody decides its outcome, as a lost lease does.
        task_queue.remove_held(task, codes.CIRCUIT_OPEN)
        monkeypatch.undo()
        stage.carry_out(run)
        a.refresh_from_db()
        assert codes_of(a) == SPARED


class TestG6ACallbackThatRaises:
    def raising_after_opening(self, task):
        real = circuit.on_provider_timeout_for(task)

        def callback(error):
            real(error)
            raise RuntimeError("after opening")

        return callback

    def raising_before_opening(self, task):
        def callback(error):
            raise RuntimeError("before opening")

        return callback

    def test_after_opening_changes_nothing(self, queued_pair):
        stage, run, a, b = queued_pair
        other = stage.repository("other", *texts("gamma", 2))
        other_run = stage.start(other)
        stage.scan(other_run)
        controls = replace(sweep.CONTROLS, on_provider_timeout_for=self.raising_after_opening)
        stage.carry_out(run, controls)
        a.refresh_from_db()
        b.refresh_from_db()
        assert (codes_of(a), codes_of(b)) == (TIMED_OUT, SPARED)
        assert calls_with(stage.server, "beta") == []
        # The slot is free and the queue goes on for another run.
        stage.carry_out(other_run, controls)
        assert len(calls_with(stage.server, "gamma")) == 1
        assert not EmbeddingTask.objects.exclude(slot=None).exists()

    def test_before_opening_is_outside_the_guarantee_and_the_error_stands(self, queued_pair):
        stage, run, a, _ = queued_pair
        controls = replace(sweep.CONTROLS, on_provider_timeout_for=self.raising_before_opening)
        stage.carry_out(run, controls)
        a.refresh_from_db()
        assert codes_of(a) == TIMED_OUT
        assert len(calls_with(stage.server, "beta")) == 1

    def test_twin_an_exception_that_is_not_contained_surfaces_and_leaves_the_slot_stuck(self, queued_pair, monkeypatch):
        stage, _, _, _ = queued_pair
        monkeypatch.setattr(admission, "notify_provider_timeout", lambda error, callback: callback(error))
        controls = replace(sweep.CONTROLS, on_provider_timeout_for=self.raising_after_opening)
        with pytest.raises(RuntimeError):
            sweep.drain(stage.provider.pk, controls)
        assert EmbeddingTask.objects.exclude(slot=None).count() == 1


class TestG2OrderHasTeeth:
    """G2 within one process; across processes in test_processes."""

    def test_twin_a_callback_that_defers_the_opening_lets_b_through(self, queued_pair):
        stage, run, _, _ = queued_pair
        threads = []

        def deferring(task):
            def open_once_b_has_arrived(error):
                stage.server.wait_for_calls(1, predicate=containing("beta"))
                circuit.open_for(task, error)
                connection.close()

            def callback(error):
                threads.append(threading.Thread(target=open_once_b_has_arrived, args=(error,)))
                threads[-1].start()

            return callback

        stage.carry_out(run, replace(sweep.CONTROLS, on_provider_timeout_for=deferring))
        for thread in threads:
            thread.join(10)
        assert len(calls_with(stage.server, "beta")) == 1


class TestG7OpeningAbortsNothing:
    """G7; native Ollama's half, the slot of a cancelled caller, stands with its admission."""

    @pytest.fixture
    def both_at_the_provider(self, stage):
        a = stage.repository("a", *texts("alpha", 2))
        b = stage.repository("b", *texts("beta", 2))
        run = stage.start(a, b)
        stage.scan(run)
        return stage, run, *two_dispatched(stage, outcome_of(run, a), outcome_of(run, b))

    def test_a_dispatched_task_is_left_alone_and_its_outcome_undecided(self, both_at_the_provider):
        _, run, of_a, of_b = both_at_the_provider
        circuit.open_for(of_a, TimedOut())
        assert task_queue.is_held(of_b)
        assert run.outcomes.get(pk=of_b.outcome_id).status == OutcomeStatus.EMBEDDING

    def test_a_late_busy_reply_does_not_come_back(self, both_at_the_provider):
        stage, run, of_a, of_b = both_at_the_provider
        circuit.open_for(of_a, TimedOut())
        task_queue.fail(of_a, TimedOut.code, "")
        assert task_queue.requeue_busy(of_b, 1, "") == TaskState.REMOVED
        stage.carry_out(run)
        assert stage.server.embedding_calls == []
        assert codes_of(run.outcomes.get(pk=of_b.outcome_id)) == SPARED

    def test_twin_a_requeue_that_skips_dispatch_allowed_comes_back(self, both_at_the_provider, monkeypatch):
        _, _, of_a, of_b = both_at_the_provider
        circuit.open_for(of_a, TimedOut())
        task_queue.fail(of_a, TimedOut.code, "")
        always_allowed(monkeypatch)
        task_queue.requeue_busy(of_b, 1, "")
        assert queued_of(of_b) == 1

    def test_twin_an_opening_that_removes_what_is_dispatched_aborts_it(self, both_at_the_provider, monkeypatch):
        _, _, of_a, of_b = both_at_the_provider
        real = transitions.stop_dispatch

        def cancelling(run_id, status, code):
            real(run_id, status, code)
            task_queue.cancel_dispatched(code, run=run_id)

        monkeypatch.setattr(transitions, "stop_dispatch", cancelling)
        circuit.open_for(of_a, TimedOut())
        assert not task_queue.is_held(of_b)


class TestG2EveryWayBackIsClosed:
    """Every way into `queued` reads whether the run still dispatches."""

    @pytest.fixture
    def open_circuit(self, stage):
        a = stage.repository("a", *texts("alpha", 2))
        b = stage.repository("b", *texts("beta", 2))
        run = stage.start(a, b)
        stage.scan(run)
        of_a, of_b = two_dispatched(stage, outcome_of(run, a), outcome_of(run, b))
        circuit.open_for(of_a, TimedOut())
        return stage, of_a, of_b

    def lose(self, *tasks):
        EmbeddingTask.objects.filter(pk__in=[task.id for task in tasks]).update(lease_expires_at="2000-01-01T00:00Z")

    def test_a_lost_lease_is_removed(self, open_circuit):
        stage, of_a, of_b = open_circuit
        self.lose(of_a, of_b)
        task_queue.reclaim(stage.provider.pk)
        assert set(EmbeddingTask.objects.values_list("state", flat=True)) == {TaskState.REMOVED}

    def test_twin_a_reclaim_that_ignores_it_queues_them(self, open_circuit, monkeypatch):
        stage, of_a, of_b = open_circuit
        self.lose(of_a, of_b)
        always_allowed(monkeypatch)
        task_queue.reclaim(stage.provider.pk)
        assert queued_of(of_a) + queued_of(of_b) == 2

    def test_what_a_stopping_worker_gives_back_is_removed(self, open_circuit):
        _, _, of_b = open_circuit
        assert task_queue.give_back(of_b)
        assert EmbeddingTask.objects.get(pk=of_b.id).state == TaskState.REMOVED

    def test_a_split_puts_no_halves(self, open_circuit):
        _, _, of_b = open_circuit
        assert batches.split(of_b, batches.load(of_b.id))
        assert queued_of(of_b) == 0

    def test_a_put_is_refused(self, open_circuit):
        _, of_a, _ = open_circuit
        outcome = RepositoryOutcome.objects.get(pk=of_a.outcome_id)
        with pytest.raises(DispatchNotAllowed), transaction.atomic():
            task_queue.put_batch(outcome, 1)


def always_allowed(monkeypatch):
    monkeypatch.setattr(task_queue, "refusal", lambda run_id, outcome_id: "")


def queued_of(task):
    return EmbeddingTask.objects.filter(outcome=task.outcome_id, state=TaskState.QUEUED).count()
