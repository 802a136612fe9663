"""Guarantees across processes: real workers, a scripted server on real sockets, and whatever database the run is tried
on (docs/architecture.md, Guarantees).
"""

import pytest

from embeddings import codes
from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched
from embeddings.models import EmbeddingTask, RunCircuit, TenantRun
from embeddings.registry import set_provider
from embeddings.runs import circuit, sweep
from embeddings.runtime import wake_ups
from embeddings.states import CircuitState, OutcomeStatus, RunStatus, TaskState
from embeddings.timeouts import OPENAI_COMPATIBLE_REQUEST_TIMEOUT
from tests.support.provider_server import Gate, containing, gated, hang, status
from tests.support.sweeps import (
    TimedOut,
    calls_with,
    codes_of,
    live_texts,
    outcome_of,
    slots_taken,
    stored_rows,
    texts,
    wait_finished,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases

TIMED_OUT = (OutcomeStatus.DEFERRED, codes.PROVIDER_TIMED_OUT, OPENAI_COMPATIBLE_REQUEST_TIMEOUT)
SPARED = (OutcomeStatus.DEFERRED, codes.CIRCUIT_OPEN, "")


@pytest.fixture
def queued_pair(stage):
    """A run with both repositories queued at a paused lane, A first."""
    a = stage.repository("a", *texts("alpha", 3))
    b = stage.repository("b", *texts("beta", 3))
    stage.paused(True)
    run = stage.start(a, b)
    stage.scan(run)
    order = EmbeddingTask.objects.order_by("pk").values_list("outcome__repository_slug", "state")
    assert list(order) == [("a", TaskState.QUEUED), ("b", TaskState.QUEUED)]
    return run, a, b


def ring(stage):
    wake_ups.notify_workers(wake_ups.DRAIN, stage.provider.pk)
    return True


def let_go(stage):
    """Unpauses the lane and rings every worker for it."""
    stage.paused(False)
    for _ in range(4):
        ring(stage)


def is_queued(repository):
    return EmbeddingTask.objects.filter(outcome__repository=repository, state=TaskState.QUEUED).exists()


class TestG2BMakesNoCall:
    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_a_times_out_while_b_is_queued(self, stage, queued_pair, fleet, workers):
        run, a, b = queued_pair
        stage.server.when(containing("alpha"), hang())
        fleet.start(workers)
        let_go(stage)
        stage.server.wait_for_calls(1)
        assert is_queued(b)
        ended = wait_finished(run)
        assert (codes_of(outcome_of(run, a)), codes_of(outcome_of(run, b))) == (TIMED_OUT, SPARED)
        assert (len(calls_with(stage.server, "alpha")), calls_with(stage.server, "beta")) == (1, [])
        assert ended.status == RunStatus.DEFERRED
        eventually(lambda: slots_taken() == 0)

    def test_twin_an_opening_that_is_deferred_lets_b_through(self, stage, queued_pair, fleet):
        run, _, _ = queued_pair
        stage.server.when(containing("alpha"), hang())
        fleet.start(2, "tests.support.broken_workers.opens_later")
        let_go(stage)
        wait_finished(run)
        assert len(calls_with(stage.server, "beta")) == 1


class TestG2AfterAKillBetweenNotifyAndFree:
    @pytest.fixture
    def killed(self, stage, queued_pair, fleet):
        stage.server.when(containing("alpha"), hang())
        (dying,) = fleet.start(1, "tests.support.broken_workers.dies_before_free")
        let_go(stage)
        dying.wait_dead()
        assert slots_taken() == 1
        return queued_pair

    def test_b_is_spared_and_the_slot_comes_free(self, stage, killed, fleet):
        run, a, b = killed
        assert RunCircuit.objects.get(run=run).state == CircuitState.OPEN
        fleet.start(2)
        wait_finished(run)
        assert (codes_of(outcome_of(run, a)), codes_of(outcome_of(run, b))) == (TIMED_OUT, SPARED)
        # The dead worker's lease runs out, and its task is not queued again.
        eventually(lambda: ring(stage) and slots_taken() == 0, 30, 0.2, "the slot comes free")
        assert len(stage.server.embedding_calls) == 1

    def test_twin_a_reclaim_that_ignores_the_circuit_queues_it_again(self, stage, killed, fleet):
        fleet.start(1, "tests.support.broken_workers.ignores_circuit")
        eventually(lambda: ring(stage) and is_queued(killed[1]), 30, 0.2, "the lost task is queued again")


class TestG2AfterALateBusyReply:
    @pytest.mark.parametrize(
        ("application", "ends"),
        [("project", TaskState.REMOVED), ("tests.support.broken_workers.ignores_circuit", TaskState.QUEUED)],
        ids=["holds", "twin"],
    )
    def test_b_was_at_the_provider_when_a_opened_the_circuit(self, stage, queued_pair, fleet, application, ends):
        """The twin's requeue does not read whether the run still dispatches: its task is back in the queue."""
        run, a, b = queued_pair
        gate = Gate()
        stage.server.when(containing("beta"), gated(gate, status(429, headers={"Retry-After": "0"})))
        of_a = held_by_this_test(outcome_of(run, a))
        fleet.start(2, application)
        let_go(stage)
        gate.wait_arrived()
        circuit.open_for(of_a, TimedOut())
        task_queue.fail(of_a, TimedOut.code, "")
        gate.release()
        # G7: the circuit did not break B's call off.
        assert stage.server.wait_until_ended(1).ended_by == "replied"
        of_b = EmbeddingTask.objects.filter(outcome=outcome_of(run, b))
        eventually(lambda: of_b.get().state == ends)
        if ends == TaskState.REMOVED:
            wait_finished(run)
            assert codes_of(outcome_of(run, b)) == SPARED
            assert len(calls_with(stage.server, "beta")) == 1


def held_by_this_test(outcome):
    """The outcome's queued task as a wider gate would have dispatched it beside another."""
    task = EmbeddingTask.objects.get(outcome=outcome)
    EmbeddingTask.objects.filter(pk=task.pk).update(
        state=TaskState.DISPATCHED, dispatch_token="held", lease_expires_at="2100-01-01T00:00Z"
    )
    return Dispatched(task.pk, "held", task.provider_id, task.generation_id, task.priority, task.run_id, outcome.pk)


class TestG8AFreshRun:
    def test_the_next_sweep_has_a_closed_circuit_and_only_embeds_what_is_missing(self, stage, fleet):
        fleet.start(2)
        a = stage.repository("a", *texts("alpha", 3))
        b = stage.repository("b", *texts("beta", 10))
        gate = Gate()
        stage.server.when(containing("alpha"), hang(), times=1)
        stage.server.when(containing("beta 4"), gated(gate), times=1)
        first = stage.start(b)
        gate.wait_arrived()
        eventually(lambda: stored_rows(b), message="the first batch is stored")
        sweep.request_cancel(first)
        wait_finished(first)
        stored = stored_rows(b)
        assert len(stored) == 4
        timed_out = wait_finished(stage.start(a))
        assert timed_out.circuit.state == CircuitState.OPEN

        second = wait_finished(stage.start(a, b))
        assert (second.status, second.circuit.state) == (RunStatus.COMPLETED, CircuitState.CLOSED)
        assert live_texts(b) == texts("beta", 10)
        assert outcome_of(second, b).embedded == 6
        assert stored <= stored_rows(b)
        assert [stage.server.texts_seen[text] for text in texts("beta", 4)] == [1] * 4


class TestAModelThatChangesInMidRun:
    def test_ends_the_run_without_beat_or_a_follower(self, stage, queued_pair, fleet):
        """What is queued for the old model is dispatched no more, so that no task's end moves the run."""
        run, a, b = queued_pair
        fleet.start(1)
        set_provider(stage.provider.name, {"embedding_model": "another"})
        mine = TenantRun.objects.filter(pk=run.pk)
        eventually(lambda: mine.get().status == RunStatus.DEFERRED, message="the run ends")
        changed = (OutcomeStatus.DEFERRED, codes.GENERATION_CHANGED, "")
        assert (codes_of(outcome_of(run, a)), codes_of(outcome_of(run, b))) == (changed, changed)
        assert not stage.server.embedding_calls
