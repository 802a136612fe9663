"""G4 and G5: only the final timeout of a logical task opens a circuit (docs/architecture.md, Guarantees)."""

import time
from dataclasses import replace

import pytest
from django.db import DatabaseError

from embeddings import codes, timeouts
from embeddings.dispatch import admission, task_queue
from embeddings.errors import EmbeddingFailed
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, Provider, RunCircuit
from embeddings.providers import retries
from embeddings.providers.openai_compatible import OpenAICompatibleProvider
from embeddings.query import interactive
from embeddings.runs import circuit, sweep
from embeddings.states import CircuitState, OutcomeStatus
from embeddings.timeouts import PROVIDER_TIMEOUT_CODES, is_provider_timeout
from project.runtime import event_loop
from tests.support.factories import make_generation
from tests.support.provider_server import (
    close_without_answer,
    delay,
    dropped,
    hang,
    reset,
    status,
    truncate,
    vectors,
    with_number,
)
from tests.support.sweeps import TimedOut, codes_of, draining, outcome_of, texts, two_dispatched

REFUSALS = {
    "unauthorized": (status(401), OutcomeStatus.FAILED, "PROVIDER_UNAUTHORIZED"),
    "forbidden": (status(403), OutcomeStatus.FAILED, "PROVIDER_UNAUTHORIZED"),
    "wrong request": (status(400), OutcomeStatus.FAILED, "PROVIDER_TEXT_REFUSED"),
    "server error": (status(500), OutcomeStatus.FAILED, "PROVIDER_SERVER_FAILED"),
    "request timeout status": (status(408), OutcomeStatus.FAILED, "PROVIDER_STATUS"),
    "gateway timeout status": (status(504), OutcomeStatus.FAILED, "PROVIDER_STATUS"),
    "timeout in words": (status(502, "ETIMEDOUT PROVIDER_TIMEOUT"), OutcomeStatus.FAILED, "PROVIDER_STATUS"),
    "redirect": (status(307, headers={"Location": "/v2"}), OutcomeStatus.FAILED, "PROVIDER_STATUS"),
    "model not loaded": (status(404), OutcomeStatus.FAILED, "PROVIDER_MODEL_NOT_LOADED"),
    "model loading": (status(503, "Loading model"), OutcomeStatus.FAILED, "PROVIDER_MODEL_NOT_LOADED"),
    "closed": (close_without_answer(), OutcomeStatus.FAILED, "PROVIDER_UNREACHABLE"),
    "reset": (reset(), OutcomeStatus.FAILED, "PROVIDER_UNREACHABLE"),
    "cut": (truncate(vectors(), 200), OutcomeStatus.FAILED, "PROVIDER_UNREACHABLE"),
    "too few vectors": (vectors(dropped(0)), OutcomeStatus.FAILED, "PROVIDER_REPLY_REFUSED"),
    "not finite": (vectors(with_number(float("nan"))), OutcomeStatus.FAILED, "PROVIDER_REPLY_NOT_FINITE"),
    "busy": (status(429, headers={"Retry-After": "0"}), OutcomeStatus.DEFERRED, "KB_VECTOR_EMBED_PROVIDER_BUSY"),
}


def circuit_of(run):
    return RunCircuit.objects.get(run=run).state


class TestG5RefusalsOpenNothing:
    @pytest.mark.parametrize("row", REFUSALS)
    def test_a_refusal(self, stage, settings, row):
        settings.BUSY_REQUEUES_MAX = 1
        reply, status_, code = REFUSALS[row]
        stage.server.script(lambda call: reply)
        a = stage.repository("a", *texts("alpha", 2))
        run = stage.swept(a)
        outcome = outcome_of(run, a)
        assert (outcome.status, outcome.source_error_code) == (status_, code)
        assert circuit_of(run) == CircuitState.CLOSED

    @pytest.mark.parametrize("row", ["unauthorized", "model loading", "gateway timeout status", "closed"])
    def test_twin_a_predicate_that_takes_any_failure_opens_it(self, stage, monkeypatch, row):
        monkeypatch.setattr(timeouts, "is_provider_timeout", lambda error: True)
        reply, _, _ = REFUSALS[row]
        stage.server.script(lambda call: reply)
        run = stage.swept(stage.repository("a", *texts("alpha", 2)))
        assert circuit_of(run) == CircuitState.OPEN


@pytest.mark.both_databases
class TestG5WhatOpensNothing:
    def test_a_cancel_by_the_caller(self, stage):
        stage.server.script(lambda call: hang())
        Provider.objects.update(embedding_timeout_ms=60_000)
        a = stage.repository("a", *texts("alpha", 2))
        run = stage.start(a)
        stage.scan(run)
        with draining(stage):
            stage.server.wait_for_calls(1)
            sweep.request_cancel(run)
        assert outcome_of(run, a).status == OutcomeStatus.CANCELLED
        assert circuit_of(run) == CircuitState.CLOSED

    def test_a_cancel_while_the_timeout_is_on_its_way(self, stage, monkeypatch):
        """The call times out, and by the time that its task is finished the caller has cancelled."""
        stage.server.script(lambda call: hang())
        a = stage.repository("a", *texts("alpha", 2))
        run = stage.start(a)
        stage.scan(run)
        real = admission.AdmissionPolicy.finish

        def cancelled_first(*arguments):
            sweep.request_cancel(run)
            return real(*arguments)

        monkeypatch.setattr(admission.AdmissionPolicy, "finish", cancelled_first)
        sweep.drain(stage.provider.pk)
        assert circuit_of(run) == CircuitState.CLOSED
        assert not EmbeddingTask.objects.exclude(slot=None).exists()

    def test_a_loop_of_ours_that_stood_still(self, stage):
        """The reply is there in time; the process that should have read it was not."""
        stage.server.script(lambda call: delay(0.3))
        a = stage.repository("a", *texts("alpha", 2))
        run = stage.start(a)
        stage.scan(run)
        with draining(stage):
            stage.server.wait_for_calls(1)
            # Not a wait: it is the stall itself, on the loop.
            event_loop.loop().call_soon_threadsafe(time.sleep, 2.5)
        assert circuit_of(run) == CircuitState.CLOSED
        assert outcome_of(run, a).source_error_code in ("", "OWN_TIMEOUT")

    @pytest.mark.parametrize("code", [*sorted(PROVIDER_TIMEOUT_CODES), None])
    def test_a_timeout_shaped_error_of_the_store(self, stage, monkeypatch, code):
        class TimeoutShaped(DatabaseError if code else TimeoutError):
            pass

        def write(*_):
            error = TimeoutShaped("canceling statement due to statement timeout")
            error.code = code
            raise error

        monkeypatch.setattr(store, "write_vectors", write)
        a = stage.repository("a", *texts("alpha", 2))
        run = stage.swept(a)
        assert codes_of(outcome_of(run, a)) == (OutcomeStatus.FAILED, codes.STORE_FAILED, codes.STORE_FAILED)
        assert circuit_of(run) == CircuitState.CLOSED

    def test_an_open_circuit_is_not_opened_again(self, stage, settings):
        a = stage.repository("a", *texts("alpha", 2))
        b = stage.repository("b", *texts("beta", 2))
        run = stage.start(a, b)
        stage.scan(run)
        of_a, of_b = two_dispatched(stage, outcome_of(run, a), outcome_of(run, b))
        circuit.open_for(of_a, TimedOut("the first"))
        opened = RunCircuit.objects.values().get(run=run)
        circuit.open_for(of_b, TimedOut("the second"))
        assert RunCircuit.objects.values().get(run=run) == opened
        # Its own timeout is still its own.
        assert outcome_of(run, b).error_code == codes.PROVIDER_TIMED_OUT


@pytest.mark.both_databases
class TestG4OnlyTheFinalFailure:
    @pytest.fixture
    def heard(self, stage):
        """Every notification of an owner that hears of any task, an interactive caller's too."""
        errors = []
        controls = replace(sweep.CONTROLS, on_provider_timeout_for=lambda task: errors.append)
        return errors, controls

    @pytest.fixture
    def retried(self, monkeypatch):
        """Contention is tried again within an interactive text's task: at once here."""
        monkeypatch.setattr(retries, "CONTENTION_PAUSE_S", 0.01)

    def put(self, stage):
        generation = make_generation(stage.provider, dimensions=None)
        return task_queue.put_interactive(stage.provider, generation, ["words"], 10_000)

    def test_an_intermediate_timeout_notifies_nobody(self, stage, heard, retried):
        errors, controls = heard
        stage.server.next(hang())
        task = self.put(stage)
        sweep.drain(stage.provider.pk, controls)
        task.refresh_from_db()
        assert (len(stage.server.embedding_calls), errors, task.error_code) == (2, [], "")

    def test_the_final_one_notifies_once(self, stage, heard, retried):
        errors, controls = heard
        stage.server.script(lambda call: hang())
        self.put(stage)
        sweep.drain(stage.provider.pk, controls)
        assert len(stage.server.embedding_calls) == 3
        assert [is_provider_timeout(error) for error in errors] == [True]

    def test_twin_a_transport_that_notifies_each_attempt_is_heard_of_a_success(
        self, stage, heard, retried, monkeypatch
    ):
        errors, controls = heard
        real = OpenAICompatibleProvider._request

        async def notifying(self, call):
            try:
                return await real(self, call)
            except timeouts.ProviderTimeoutError as error:
                timeouts.notify_provider_timeout(error, errors.append)
                raise

        monkeypatch.setattr(OpenAICompatibleProvider, "_request", notifying)
        stage.server.next(hang())
        self.put(stage)
        sweep.drain(stage.provider.pk, controls)
        assert len(errors) == 1

    def test_a_search_that_times_out_opens_no_runs_circuit(self, stage, retried):
        stage.server.script(lambda call: hang())
        run = stage.start(stage.repository("a", *texts("alpha", 2)))
        stage.scan(run)
        with pytest.raises(EmbeddingFailed) as raised:
            interactive.embed_texts(stage.provider, ["words"])
        assert is_provider_timeout(raised.value)
        assert circuit_of(run) == CircuitState.CLOSED
