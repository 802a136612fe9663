"""G9, and what a stop leaves behind: workers killed, suspended and told to stop (docs/architecture.md, Guarantees)."""

import pytest

from embeddings.models import EmbeddingTask, KnowledgeRow, Provider, TenantRun
from embeddings.runs.follow import follow
from embeddings.states import OutcomeStatus, RunStatus, TaskState
from tests.support.provider_server import Gate, containing, gated, hang
from tests.support.sweeps import live_texts, outcome_of, stored_rows, texts, wait_finished
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases


def assert_whole(stage, repository, count, batches=1):
    """Every row once, live, with its own vector; so many batches were bought twice, at most."""
    assert live_texts(repository) == texts("alpha", count)
    assert KnowledgeRow.objects.filter(repository=repository).count() == count
    bought = [stage.server.texts_seen[text] for text in texts("alpha", count)]
    assert max(bought) <= 2
    assert bought.count(2) <= batches * stage.provider.batch_size


class TestG9KillNine:
    @pytest.mark.parametrize("step", ["before_storing", "in_store", "while_scanning"])
    def test_of_a_worker_at_a_step_of_its_own(self, stage, fleet, step):
        alpha = stage.repository("a", *texts("alpha", 10))
        (dying,) = fleet.start(1, f"tests.support.broken_workers.dies_{step}")
        run = stage.start(alpha)
        dying.wait_dead()
        fleet.start(1)
        follow([run])
        assert TenantRun.objects.get(pk=run.pk).status == RunStatus.COMPLETED
        (again,) = follow([stage.start(alpha)])
        assert outcome_of(again, alpha).status == OutcomeStatus.UNCHANGED
        # A batch is stored while the next one is at the provider: a death there costs both.
        assert_whole(stage, alpha, 10, batches=2)

    def test_of_every_worker_while_one_is_at_the_provider(self, stage, fleet):
        alpha = stage.repository("a", *texts("alpha", 10))
        gate = Gate()
        stage.server.when(containing("alpha 4"), gated(gate), times=1)
        fleet.start(2)
        run = stage.start(alpha)
        gate.wait_arrived()
        eventually(lambda: stored_rows(alpha), message="the batch before it is stored")
        for worker in fleet.workers:
            worker.kill()
        follow([run])
        assert TenantRun.objects.get(pk=run.pk).status == RunStatus.COMPLETED
        assert_whole(stage, alpha, 10)

    def test_a_worker_that_was_suspended_past_its_lease_stores_nothing(self, stage, fleet):
        alpha = stage.repository("a", *texts("alpha", 6))
        gate = Gate()
        stage.server.when(containing("alpha 0"), gated(gate), times=1)
        (suspended,) = fleet.start(1)
        run = stage.start(alpha)
        gate.wait_arrived()
        suspended.pause()
        gate.release()
        follow([run])
        outcome = outcome_of(run, alpha)
        assert (outcome.status, outcome.embedded) == (OutcomeStatus.SUCCEEDED, 6)
        before = list(EmbeddingTask.objects.order_by("pk").values())
        suspended.resume()
        # It has dealt with its late reply once it carries out another run.
        wait_finished(stage.start(stage.repository("other", *texts("gamma", 2))))
        assert list(EmbeddingTask.objects.filter(outcome=outcome).order_by("pk").values()) == before
        outcome.refresh_from_db()
        assert outcome.embedded == 6
        assert live_texts(alpha) == texts("alpha", 6)


class TestShutdown:
    def test_a_stopping_worker_gives_its_task_back_uncounted_within_seconds(self, stage, fleet):
        alpha = stage.repository("a", *texts("alpha", 3))
        stage.server.when(containing("alpha"), hang(), times=1)
        Provider.objects.update(embedding_timeout_ms=60_000)
        (worker,) = fleet.start(1)
        run = stage.start(alpha)
        stage.server.wait_for_calls(1)
        worker.terminate(timeout=8)
        task = EmbeddingTask.objects.get()
        assert (task.state, task.attempts, task.losses, task.slot) == (TaskState.QUEUED, 0, 0, None)
        follow([run])
        assert outcome_of(run, alpha).status == OutcomeStatus.SUCCEEDED
