"""G13: decided means over. No task is queued or dispatched for a decided outcome, none stays queued in a finished run, and no
row is bound to a task that nothing can dispatch (docs/architecture.md, Guarantees).
"""

import pytest
from django.db import transaction

from embeddings import codes, tasks
from embeddings.dispatch import admission, batches, task_queue
from embeddings.errors import DispatchNotAllowed
from embeddings.models import EmbeddingTask, KnowledgeRow, RepositoryOutcome, TenantRun
from embeddings.runs import progress, sweep, transitions
from embeddings.states import OutcomeStatus, RunStatus, TaskState
from tests.support.commanding import manage
from tests.support.provider_server import Gate, ProviderServer, containing, gated, status
from tests.support.sweeps import DIMENSIONS, OLLAMA, make_site, outcome_of, stored, texts
from tests.support.threads import in_threads

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]


def queued_of(outcome) -> int:
    return EmbeddingTask.objects.filter(outcome=outcome, state=TaskState.QUEUED).count()


def bound_for_ever(outcome):
    """Pending rows that a task has which nothing will dispatch."""
    rows = KnowledgeRow.objects.filter(repository=outcome.repository_id, vector=None, undeliverable_reason="")
    return rows.filter(task__settled_at=None, task__isnull=False, task__outcome__finished_at__isnull=False)


def decide(outcome, status_=OutcomeStatus.FAILED) -> None:
    with transaction.atomic():
        task_queue.lock_run(outcome.run_id)
        assert transitions.decide(outcome.pk, status_, code="X")


def knows_the_circuit_alone(run_id, outcome_id) -> str:
    """The former rule: whether the run dispatches, whatever became of the outcome."""
    return "" if run_id is None or task_queue.lock_run(run_id).dispatch_allowed else codes.DISPATCH_STOPPED


@pytest.fixture
def at_work(stage):
    """An outcome with two batches of four queued and more rows behind them."""
    a = stage.repository("a", *texts("alpha", 12))
    run = stage.start(a)
    stage.scan(run)
    return stage, run, a, outcome_of(run, a)


@pytest.fixture
def held(at_work):
    """The same, its first task dispatched."""
    stage, run, a, outcome = at_work
    task = admission.policy_for(stage.provider).admit(stage.provider)
    assert task.outcome_id == outcome.pk
    return stage, run, a, outcome, task


class TestARefillThatReadTheOutcomeBeforeItWasDecided:
    """The first schedule that was seen: the decision falls between the refill's reading and its put."""

    @pytest.fixture
    def stale(self, at_work):
        stage, run, a, outcome = at_work
        EmbeddingTask.objects.filter(outcome=outcome).delete()
        read = RepositoryOutcome.objects.select_related("repository", "run__provider", "run__generation").get(
            pk=outcome.pk
        )
        decide(outcome)
        return stage, run, a, read

    def test_queues_nothing_and_the_next_sweep_completes(self, stale):
        stage, run, a, read = stale
        with pytest.raises(DispatchNotAllowed):
            batches.refill(read)
        assert (queued_of(read), bound_for_ever(read).count()) == (0, 0)
        stage.carry_out(run)
        again = stage.swept(a)
        assert (again.status, stored(a)) == (RunStatus.COMPLETED, 12)

    def test_twin_with_the_former_rule_rows_are_bound_for_ever(self, stale, monkeypatch):
        monkeypatch.setattr(task_queue, "refusal", knows_the_circuit_alone)
        _, _, _, read = stale
        assert batches.refill(read) == 2
        assert bound_for_ever(read).exists()


WAYS_BACK = {
    "busy requeue": lambda task: task_queue.requeue_busy(task, 1, ""),
    "give-back": task_queue.give_back,
    "split": lambda task: batches.split(task, batches.load(task.id)),
    "lost lease": lambda task: (
        EmbeddingTask.objects.filter(pk=task.id).update(lease_expires_at="2020-01-01T00:00Z"),
        task_queue.reclaim(task.provider_id),
    ),
}


class TestEveryWayBack:
    @pytest.mark.parametrize("way", WAYS_BACK)
    def test_is_closed_to_a_decided_outcome(self, held, way):
        _, _, _, outcome, task = held
        decide(outcome)
        WAYS_BACK[way](task)
        row = EmbeddingTask.objects.get(pk=task.id)
        assert (row.state, row.error_code, row.slot) == (TaskState.REMOVED, codes.OUTCOME_DECIDED, None)
        assert (queued_of(outcome), bound_for_ever(outcome).count()) == (0, 0)

    @pytest.mark.parametrize("way", WAYS_BACK)
    def test_twin_with_the_former_rule_it_is_open(self, held, monkeypatch, way):
        monkeypatch.setattr(task_queue, "refusal", knows_the_circuit_alone)
        _, _, _, outcome, task = held
        decide(outcome)
        WAYS_BACK[way](task)
        assert queued_of(outcome) > 0


class TestDispatch:
    def test_a_task_that_an_earlier_version_left_queued_is_not_dispatched(self, at_work):
        stage, _, _, outcome = at_work
        RepositoryOutcome.objects.filter(pk=outcome.pk).update(status=OutcomeStatus.FAILED)
        assert queued_of(outcome) == 2
        assert admission.policy_for(stage.provider).admit(stage.provider) is None

    def test_beat_removes_it_and_the_doctor_reports_it_until_then(self, at_work):
        _, run, _, outcome = at_work
        RepositoryOutcome.objects.filter(pk=outcome.pk).update(status=OutcomeStatus.FAILED, is_recorded=True)
        TenantRun.objects.filter(pk=run.pk).update(status=RunStatus.FAILED)
        assert "queued for an outcome that is decided" in manage("doctor").out
        tasks.go_round()
        assert (queued_of(outcome), bound_for_ever(outcome).count()) == (0, 0)
        assert "queued for an outcome that is decided" not in manage("doctor").out

    def test_a_sweep_without_beat_removes_it_too(self, at_work):
        stage, run, a, outcome = at_work
        RepositoryOutcome.objects.filter(pk=outcome.pk).update(status=OutcomeStatus.FAILED, is_recorded=True)
        TenantRun.objects.filter(pk=run.pk).update(status=RunStatus.FAILED)
        assert (stage.swept(a).status, stored(a)) == (RunStatus.COMPLETED, 12)


def test_a_finished_run_has_no_queued_task(at_work):
    _, run, _, outcome = at_work
    RepositoryOutcome.objects.filter(pk=outcome.pk).update(status=OutcomeStatus.FAILED)
    sweep.advance(run.pk)
    assert TenantRun.objects.get(pk=run.pk).status == RunStatus.FAILED
    assert queued_of(outcome) == 0


class TestTwoCallsOfOneOutcome:
    """The second schedule: at cap 2, one call is refused and decides the outcome, the other meets a busy server."""

    @pytest.fixture
    def site(self, tmp_path):
        with ProviderServer(dimensions=DIMENSIONS) as server:
            yield make_site(OLLAMA, server, tmp_path, batch_size=4, max_in_flight=2, embedding_timeout_ms=60_000)

    def play(self, site):
        refused, busy = Gate(), Gate()
        site.server.when(containing("alpha 00"), gated(refused, status(401)), times=1)
        site.server.when(containing("alpha 04"), gated(busy, status(429, headers={"Retry-After": "1"})), times=1)
        repository = site.repository("a", *(f"alpha {number:02d}" for number in range(12)))
        # The other one keeps the run from finishing meanwhile.
        run = site.start_and_scan(repository, site.repository("b", "beta"), concurrency=1)
        with in_threads() as submit:
            for _ in range(2):
                submit(site.drain)
            refused.wait_arrived()
            busy.wait_arrived()
            refused.release()
            outcome = outcome_of(run, repository)
            while not RepositoryOutcome.objects.filter(pk=outcome.pk, status=OutcomeStatus.FAILED).exists():
                progress.advance_outcome(outcome.pk)
            busy.release()
        return run, repository, outcome

    def test_the_busy_one_is_not_queued_again_and_the_next_sweep_completes(self, site):
        run, repository, outcome = self.play(site)
        assert not EmbeddingTask.objects.filter(outcome=outcome, busy_requeues=1).exists()
        assert (queued_of(outcome), bound_for_ever(outcome).count()) == (0, 0)
        site.carry_out(run)
        site.server.clear_script()
        assert (site.swept(repository).status, stored(repository)) == ("completed", 12)

    def test_twin_with_the_former_rule_it_is_queued_again(self, site, monkeypatch):
        monkeypatch.setattr(task_queue, "refusal", knows_the_circuit_alone)
        _, _, outcome = self.play(site)
        assert EmbeddingTask.objects.filter(outcome=outcome, busy_requeues=1).exists()


class TestACancelledOutcome:
    """The third schedule: batches were queued, and dispatched, for an outcome that had been cancelled."""

    def test_gets_no_further_batch(self, held):
        stage, run, _, outcome, task = held
        sweep.cancel_outcome(outcome_of(run, outcome.repository))
        task_queue.release_slot(task)
        progress.advance_outcome(outcome.pk)
        read = RepositoryOutcome.objects.select_related("repository", "run__provider", "run__generation").get(
            pk=outcome.pk
        )
        with pytest.raises(DispatchNotAllowed):
            batches.refill(read)
        assert (queued_of(outcome), admission.policy_for(stage.provider).admit(stage.provider)) == (0, None)
