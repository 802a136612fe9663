"""The drain: a refused text alone is marked undeliverable, a wrong model marks nothing, and a step leaves nothing behind."""

from dataclasses import replace

import pytest
from django.db import OperationalError, connection

from embeddings import codes
from embeddings.dispatch import batches, calls, task_queue
from embeddings.models import EmbeddingGeneration, EmbeddingTask, KnowledgeRow, Provider, RunCircuit
from embeddings.providers.openai_compatible import OpenAICompatibleProvider
from embeddings.runs import sweep
from embeddings.states import CircuitState, OutcomeStatus, TaskState
from tests.support.factories import make_generation
from tests.support.provider_server import Gate, containing, gated, hang, status, vectors, with_number
from tests.support.sweeps import calls_with, codes_of, draining, live_texts, outcome_of, texts
from tests.support.waiting import eventually


def not_finite_for(server, word):
    """A reply whose vector for the text that holds the word is NaN."""

    def plan(call):
        at = next((place for place, text in enumerate(call.texts) if word in text), None)
        return None if at is None else vectors(with_number(float("nan"), at=at))

    server.script(plan)


class TestARefusedText:
    @pytest.fixture
    def batch_of_32(self, stage):
        Provider.objects.update(batch_size=32)
        return stage.repository("a", *(f"alpha {number:02d}" for number in range(32)))

    @pytest.mark.parametrize(("code", "guilty"), [(400, 0), (400, 31), (413, 13), (422, 14), (500, 15)])
    def test_costs_at_most_twelve_calls_and_is_marked_alone(self, stage, batch_of_32, code, guilty):
        stage.server.when(containing(f"alpha {guilty:02d}"), status(code))
        run = stage.swept(batch_of_32)
        outcome = outcome_of(run, batch_of_32)
        assert (outcome.status, outcome.embedded, outcome.undeliverable) == (OutcomeStatus.SUCCEEDED, 31, 1)
        assert len(stage.server.embedding_calls) <= 12
        assert outcome.provider_calls == len(stage.server.embedding_calls)
        row = KnowledgeRow.objects.exclude(undeliverable_reason="").get()
        assert (row.text, row.version.is_live) == (f"alpha {guilty:02d}", True)
        assert str(code) in row.undeliverable_reason

    @pytest.mark.parametrize("guilty", [0, 13, 31])
    def test_a_reply_that_is_not_finite_is_isolated_alike(self, stage, batch_of_32, guilty):
        not_finite_for(stage.server, f"alpha {guilty:02d}")
        outcome = outcome_of(stage.swept(batch_of_32), batch_of_32)
        assert (outcome.status, outcome.embedded, outcome.undeliverable) == (OutcomeStatus.SUCCEEDED, 31, 1)
        assert len(stage.server.embedding_calls) <= 12

    def test_the_only_text_of_a_repository_is_judged_by_the_control_text(self, stage):
        a = stage.repository("a", "alpha")
        stage.server.when(containing("alpha"), status(400))
        outcome = outcome_of(stage.swept(a), a)
        assert codes_of(outcome) == (OutcomeStatus.FAILED, codes.ALL_UNDELIVERABLE, "")
        assert outcome.undeliverable == 1

    def test_the_only_text_whose_reply_is_not_finite_too(self, stage):
        a = stage.repository("a", "alpha")
        not_finite_for(stage.server, "alpha")
        outcome = outcome_of(stage.swept(a), a)
        assert codes_of(outcome) == (OutcomeStatus.FAILED, codes.ALL_UNDELIVERABLE, "")

    @pytest.mark.parametrize(("code", "source"), [(400, "PROVIDER_TEXT_REFUSED"), (500, "PROVIDER_SERVER_FAILED")])
    def test_a_server_that_refuses_everything_marks_no_row(self, stage, batch_of_32, code, source):
        stage.server.script(lambda call: status(code))
        outcome = outcome_of(stage.swept(batch_of_32), batch_of_32)
        assert codes_of(outcome) == (OutcomeStatus.FAILED, codes.PROVIDER_FAILED, source)
        assert (outcome.undeliverable, outcome.pending) == (0, 32)
        assert len(stage.server.embedding_calls) <= 4

    def test_twin_without_the_control_text_a_wrong_model_marks_the_whole_knowledge_base(
        self, stage, batch_of_32, monkeypatch
    ):
        monkeypatch.setattr(batches, "has_landed", lambda root: True)
        stage.server.script(lambda call: status(400))
        assert outcome_of(stage.swept(batch_of_32), batch_of_32).undeliverable == 32

    def test_a_control_text_that_times_out_is_the_providers_timeout(self, stage):
        a = stage.repository("a", "alpha")
        stage.server.when(containing("alpha"), status(400))
        stage.server.when(containing("plain sentence"), hang())
        run = stage.swept(a)
        assert outcome_of(run, a).error_code == codes.PROVIDER_TIMED_OUT
        assert RunCircuit.objects.get(run=run).state == CircuitState.OPEN
        assert not EmbeddingTask.objects.exclude(slot=None).exists()

    def test_a_control_text_that_meets_a_busy_server_is_asked_again(self, stage):
        a = stage.repository("a", "alpha")
        stage.server.when(containing("alpha"), status(400))
        stage.server.when(containing("plain sentence"), status(429, headers={"Retry-After": "0"}), times=1)
        outcome = outcome_of(stage.swept(a), a)
        assert codes_of(outcome) == (OutcomeStatus.FAILED, codes.ALL_UNDELIVERABLE, "")
        assert outcome.provider_calls == len(stage.server.embedding_calls) == 4

    def test_timeouts_are_never_split(self, stage, batch_of_32):
        stage.server.script(lambda call: hang())
        stage.swept(batch_of_32)
        assert len(stage.server.embedding_calls) == 1


@pytest.mark.both_databases
class TestOneTextOnce:
    def test_duplicates_are_sent_once_and_bound_to_every_row(self, stage):
        a = stage.repository("a", *["alpha"] * 6, "beta")
        outcome = outcome_of(stage.swept(a), a)
        assert stage.server.texts_seen == {"alpha": 1, "beta": 1}
        assert (outcome.rows, outcome.pending) == (7, 0)
        assert live_texts(a) == ["alpha"] * 6 + ["beta"]

    def test_a_batch_is_bounded_by_distinct_texts(self, stage):
        a = stage.repository("a", *(text for text in texts("alpha", 6) for _ in range(2)))
        stage.swept(a)
        assert sorted(len(call.texts) for call in stage.server.embedding_calls) == [2, 4]

    def test_rows_that_are_gone_when_the_reply_comes_are_not_counted(self, stage):
        gate = Gate()
        stage.server.script(lambda call: gated(gate))
        a = stage.repository("a", *texts("alpha", 3))
        run = stage.start(a)
        stage.scan(run)
        with draining(stage):
            gate.wait_arrived()
            KnowledgeRow.objects.filter(text="alpha 1").delete()
            gate.release()
        assert (outcome_of(run, a).embedded, live_texts(a)) == (2, ["alpha 0", "alpha 2"])


@pytest.mark.both_databases
class TestAChangedConfiguration:
    def test_the_model_is_the_generations_whatever_the_drain_read_at_its_start(self, stage):
        """Mid-drain the model changes and a task of the new generation is next: it is never asked of the old model."""
        gate = Gate()
        a = stage.repository("a", *texts("alpha", 2))
        b = stage.repository("b", *texts("beta", 2))
        stage.server.when(containing("alpha"), gated(gate), times=1)
        stage.scan(stage.start(a))
        with draining(stage):
            gate.wait_arrived()
            provider = Provider.objects.get(pk=stage.provider.pk)
            provider.embedding_model = "another"
            provider.save()
            stage.scan(stage.start(b))
            gate.release()
        asked = {call.texts[0].split()[0]: call.body["model"] for call in stage.server.embedding_calls}
        assert asked == {"alpha": "embed", "beta": "another"}
        newest = EmbeddingGeneration.objects.get(model="another")
        assert set(KnowledgeRow.objects.filter(repository=b).values_list("generation", flat=True)) == {newest.pk}


@pytest.mark.both_databases
class TestWhatAStepLeavesBehind:
    def test_a_call_that_cannot_be_made_ends_its_own_task(self, stage, monkeypatch):
        async def broken(self, call):
            raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")

        monkeypatch.setattr(OpenAICompatibleProvider, "embed", broken)
        a = stage.repository("a", "alpha")
        outcome = outcome_of(stage.swept(a), a)
        assert codes_of(outcome) == (OutcomeStatus.FAILED, codes.PROVIDER_FAILED, "PROVIDER_ERROR")
        assert not EmbeddingTask.objects.exclude(slot=None).exists()

    def test_a_key_that_is_not_set_fails_the_task_without_a_call(self, stage):
        Provider.objects.update(api_key_env="SLUICEGATE_KEY_UNSET")
        a = stage.repository("a", "alpha")
        outcome = outcome_of(stage.swept(a), a)
        assert (outcome.source_error_code, outcome.provider_calls) == ("PROVIDER_CONFIGURATION", 0)
        assert "SLUICEGATE_KEY_UNSET" in outcome.error_detail

    def test_a_task_whose_rows_have_gone_is_removed_without_a_call(self, stage):
        a = stage.repository("a", "alpha")
        run = stage.start(a)
        stage.scan(run)
        KnowledgeRow.objects.all().delete()
        stage.carry_out(run)
        assert stage.server.embedding_calls == []
        assert EmbeddingTask.objects.get().error_code == codes.ROWS_GONE
        assert outcome_of(run, a).provider_calls == 0

    def test_a_refused_reply_of_several_interactive_texts_fails_them(self, stage):
        stage.server.script(lambda call: vectors(with_number(float("nan"))))
        task = task_queue.put_interactive(stage.provider, make_generation(stage.provider), ["a", "b"], 5_000)
        sweep.drain(stage.provider.pk)
        task.refresh_from_db()
        assert (task.state, task.error_code) == (TaskState.FAILED, "PROVIDER_REPLY_NOT_FINITE")

    def test_an_owner_whose_database_is_locked_is_told_again(self, stage):
        heard = []

        def on_task_ended(task):
            heard.append(task.id)
            if len(heard) == 1:
                raise OperationalError("database is locked")
            sweep.CONTROLS.on_task_ended(task)

        a = stage.repository("a", *texts("alpha", 3))
        run = stage.carry_out(stage.start(a), replace(sweep.CONTROLS, on_task_ended=on_task_ended))
        assert outcome_of(run, a).status == OutcomeStatus.SUCCEEDED
        assert len(heard) == 2

    def test_a_cancelled_call_is_broken_off_and_its_slot_comes_free(self, stage):
        Provider.objects.update(embedding_timeout_ms=60_000)
        stage.server.script(lambda call: hang())
        run = stage.start(stage.repository("a", "alpha"))
        stage.scan(run)
        with draining(stage):
            (call,) = stage.server.wait_for_calls(1)
            sweep.request_cancel(run)
        assert stage.server.wait_until_ended(call.number).ended_by == "client_closed"
        assert not EmbeddingTask.objects.exclude(slot=None).exists()

    def test_told_to_stop_it_gives_the_task_back(self, stage):
        Provider.objects.update(embedding_timeout_ms=60_000)
        stage.server.script(lambda call: hang())
        stage.scan(stage.start(stage.repository("a", "alpha")))
        stopped = []
        with draining(stage, replace(sweep.CONTROLS, should_stop=lambda: bool(stopped))):
            stage.server.wait_for_calls(1)
            stopped.append(True)
        task = EmbeddingTask.objects.get()
        assert (task.state, task.attempts, task.losses, task.slot) == (TaskState.QUEUED, 0, 0, None)

    @pytest.mark.parametrize("is_interactive", [False, True])
    def test_while_a_call_is_out_no_connection_is_held(self, stage, is_interactive):
        gate = Gate()
        stage.server.script(lambda call: gated(gate))
        Provider.objects.update(query_timeout_ms=10_000, embedding_timeout_ms=10_000)
        if is_interactive:
            task_queue.put_interactive(stage.provider, make_generation(stage.provider, dimensions=8), ["a"], 5_000)
        else:
            stage.scan(stage.start(stage.repository("a", "alpha")))
        held = []

        def look():
            """Asked at the start of the step, and then between waits."""
            if gate.arrived:
                held.append(connection.connection is not None)
                if len(held) == 2:
                    gate.release()
            return False

        sweep.drain(stage.provider.pk, replace(sweep.CONTROLS, should_stop=look))
        assert held[1] is False
        assert held[0] is not is_interactive

    def test_a_busy_batch_frees_the_lane_for_an_interactive_text(self, stage):
        stage.server.when(containing("alpha"), status(429, headers={"Retry-After": "1"}), times=1)
        a = stage.repository("a", "alpha")
        run = stage.start(a)
        stage.scan(run)
        sweep.drain(stage.provider.pk)
        text = task_queue.put_interactive(stage.provider, run.generation, ["words"], 5_000)
        sweep.drain(stage.provider.pk)
        text.refresh_from_db()
        assert text.state == TaskState.STORED
        assert len(calls_with(stage.server, "alpha")) == 1
        stage.carry_out(run)
        assert outcome_of(run, a).status == OutcomeStatus.SUCCEEDED
        assert outcome_of(run, a).provider_calls == 2


@pytest.mark.both_databases
def test_two_drains_share_one_lane(stage):
    """Whoever drains, however many: one call at a time, each text once."""
    a = stage.repository("a", *texts("alpha", 20))
    b = stage.repository("b", *texts("beta", 20))
    run = stage.start(a, b)
    stage.scan(run)
    with draining(stage), draining(stage), draining(stage):
        eventually(lambda: sweep.advance(run.pk).finished_at, message="the run finishes")
    assert stage.server.peak_in_flight == 1
    assert set(stage.server.texts_seen.values()) == {1}
    assert calls.CONTROL_TEXT not in stage.server.texts_seen
