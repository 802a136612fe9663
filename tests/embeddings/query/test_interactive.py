"""Interactive texts: their caller drains while it waits, without any worker and without Valkey."""

import threading

import numpy as np
import pytest
from django.db import connection

from embeddings import codes
from embeddings.dispatch import delivery, task_queue
from embeddings.errors import EmbeddingFailed, TaskExpired, TaskRemoved
from embeddings.models import EmbeddingTask, Provider
from embeddings.query import interactive
from embeddings.runs import sweep
from embeddings.states import TaskState
from tests.support.factories import make_generation
from tests.support.provider_server import Gate, containing, gated, hang, status, vector_of
from tests.support.sweeps import DIMENSIONS, draining, outcome_of, texts
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases


def embed(stage, *words, **options):
    return interactive.embed_texts(stage.provider, words or ["words"], **options)


class Caller(threading.Thread):
    """Embeds one text in a thread of its own; `result` is its vectors or what it raised."""

    def __init__(self, stage, text="words", **options):
        super().__init__()
        self.call = lambda: embed(stage, text, **options)
        self.result = None
        self.start()

    def run(self):
        try:
            self.result = self.call()
        except Exception as error:
            self.result = error
        finally:
            connection.close()

    def end(self):
        self.join(20)
        assert not self.is_alive()
        return self.result


def test_vectors_in_the_order_of_the_texts(stage):
    found = embed(stage, "a", "b", "a")
    assert found.dtype == np.float32
    assert np.allclose(found, [vector_of(text, DIMENSIONS) for text in "aba"], atol=1e-6)
    task = EmbeddingTask.objects.get()
    assert (task.state, task.slot) == (TaskState.STORED, None)


@pytest.mark.parametrize(("given", "sent"), [("a\0b", "a b"), ("a\ud800b", "a?b"), ("\U0001f600", "\U0001f600")])
def test_what_no_request_can_carry_is_replaced(stage, given, sent):
    embed(stage, given)
    assert list(stage.server.texts_seen) == [sent]


def test_it_overtakes_a_backlog_and_leaves_it_to_others(stage):
    a = stage.repository("a", *texts("alpha", 20))
    run = stage.start(a)
    stage.scan(run)
    embed(stage)
    assert stage.server.embedding_calls[0].texts == ("words",)
    stage.carry_out(run)
    assert set(stage.server.texts_seen.values()) == {1}
    assert outcome_of(run, a).embedded == 20


def test_many_at_once_all_come_to_their_turn(stage):
    callers = [Caller(stage, f"text {number}", timeout_ms=20_000) for number in range(6)]
    for number, caller in enumerate(callers):
        assert np.allclose(caller.end()[0], vector_of(f"text {number}", DIMENSIONS), atol=1e-6)
    assert stage.server.peak_in_flight == 1


def test_it_waits_for_a_batch_that_is_out_and_goes_next(stage):
    gate = Gate()
    stage.server.when(containing("alpha"), gated(gate))
    run = stage.start(stage.repository("a", *texts("alpha", 8)))
    stage.scan(run)
    with draining(stage):
        gate.wait_arrived()
        caller = Caller(stage, timeout_ms=20_000)
        eventually(lambda: task_queue.peek(stage.provider.pk, "fair") == interactive_task().pk)
        gate.release()
        assert len(caller.end()) == 1
    assert stage.server.embedding_calls[1].texts == ("words",)


def interactive_task():
    return EmbeddingTask.objects.filter(run=None).first() or EmbeddingTask()


class TestEnds:
    def test_its_turn_does_not_come(self, stage):
        Provider.objects.update(is_paused=True)
        with pytest.raises(TaskExpired):
            embed(stage, timeout_ms=200)
        assert (EmbeddingTask.objects.get().state, stage.server.embedding_calls) == (TaskState.REMOVED, [])

    def test_a_refusal_is_its_own_code(self, stage):
        stage.server.script(lambda call: status(401))
        with pytest.raises(EmbeddingFailed) as raised:
            embed(stage)
        assert raised.value.code == "PROVIDER_UNAUTHORIZED"

    def test_a_caller_that_cancels_hears_at_once_and_its_call_is_broken_off(self, stage):
        stage.server.script(lambda call: hang())
        Provider.objects.update(query_timeout_ms=60_000)
        with pytest.raises(TaskRemoved):
            embed(stage, is_cancelled=lambda: stage.server.in_flight > 0)
        eventually(lambda: stage.server.in_flight == 0)
        eventually(lambda: not EmbeddingTask.objects.exclude(slot=None).exists())
        assert EmbeddingTask.objects.get().error_code == codes.RUN_CANCELLED

    def test_a_caller_that_cancels_while_queued_is_never_sent(self, stage):
        Provider.objects.update(is_paused=True)
        with pytest.raises(TaskRemoved):
            embed(stage, is_cancelled=lambda: True)
        Provider.objects.update(is_paused=False)
        assert sweep.drain(stage.provider.pk) == 0

    def test_a_worker_that_dies_with_it_costs_one_lease(self, stage):
        """Another holder dispatched it and is gone: the caller takes it over once the lease has run out."""
        make_generation(stage.provider, dimensions=None)
        Provider.objects.update(is_paused=True)
        caller = Caller(stage, timeout_ms=20_000)
        task = eventually(lambda: EmbeddingTask.objects.first())
        EmbeddingTask.objects.filter(pk=task.pk).update(
            state=TaskState.DISPATCHED, slot=0, dispatch_token="gone", lease_expires_at="2000-01-01T00:00Z"
        )
        Provider.objects.update(is_paused=False)
        sweep.drain(stage.provider.pk)
        assert len(caller.end()) == 1
        assert EmbeddingTask.objects.get().losses == 1


class TestDelivery:
    def test_vectors_come_back_as_they_were(self):
        vectors = np.array([[1.5, -2.25], [0, 1e-30]], dtype=np.float32)
        assert np.array_equal(delivery.decode(delivery.encode(vectors)), vectors)
