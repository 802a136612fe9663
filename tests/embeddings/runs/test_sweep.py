"""Sweeps: how runs start, what each repository's part becomes, and how a run ends (docs/architecture.md, Data and states)."""

import threading

import pytest
from django.db import connection, transaction
from django.utils import timezone

from embeddings import codes
from embeddings.dispatch import batches, task_queue
from embeddings.errors import UsageError
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, KnowledgeRow, Provider, Repository, RepositoryOutcome, TenantRun
from embeddings.runs import circuit, sweep, totals, transitions
from embeddings.runtime import shutdown
from embeddings.states import CircuitState, OutcomeStatus, RunStatus, RunTrigger, TaskState
from tests.support.factories import make_outcome, make_provider, make_repository, make_run, make_tenant
from tests.support.provider_server import Gate, containing, gated, hang, status, vector_of
from tests.support.sweeps import DIMENSIONS, TimedOut, codes_of, draining, live_texts, outcome_of, texts, two_dispatched

pytestmark = pytest.mark.both_databases

PAST = "2000-01-01T00:00Z"
S = OutcomeStatus


class TestStarting:
    def test_one_run_for_each_provider_with_a_closed_circuit(self, transactional_db):
        first, second = make_provider(), make_provider()
        chosen = [make_repository(make_tenant(embedding_provider=each)) for each in (first, second, first)]
        runs = sweep.start(chosen, trigger=RunTrigger.API, concurrency=3)
        assert [(run.provider, run.outcomes.count()) for run in runs] == [(first, 2), (second, 1)]
        assert {(run.status, run.circuit.state, run.concurrency, run.trigger) for run in runs} == {
            (RunStatus.QUEUED, CircuitState.CLOSED, 3, RunTrigger.API)
        }

    @pytest.mark.parametrize("missing", ["provider", "model"])
    def test_refused_before_anything_is_written(self, transactional_db, missing):
        provider = None if missing == "provider" else make_provider(embedding_model="")
        with pytest.raises(UsageError):
            sweep.start([make_repository(make_tenant(embedding_provider=provider))], trigger=RunTrigger.COMMAND)
        assert not TenantRun.objects.exists()

    def test_a_repository_that_is_busy_in_another_run_is_skipped(self, stage):
        a, b = stage.repository("a", "alpha"), stage.repository("b", "beta")
        first = stage.start(a)
        second = stage.start(a, b)
        assert codes_of(outcome_of(second, a)) == (S.SKIPPED, codes.REPOSITORY_BUSY, "")
        assert outcome_of(second, b).status == S.PENDING
        stage.carry_out(second)
        stage.carry_out(first)
        assert (outcome_of(first, a).status, second.status) == (S.SUCCEEDED, RunStatus.COMPLETED)

    def test_a_run_that_could_be_over_is_advanced_before_its_repository_is_called_busy(self, stage):
        a = stage.repository("a", "alpha")
        first = stage.start(a)
        stage.scan(first)
        circuit.open_for(task_queue.admit(stage.provider.pk, lambda cap: 1, "fair"), TimedOut())
        RepositoryOutcome.objects.update(status=S.EMBEDDING)
        EmbeddingTask.objects.update(lease_expires_at=PAST)
        assert outcome_of(stage.start(a), a).status == S.PENDING

    def test_two_starts_at_once_give_one_of_them_the_repository(self, stage):
        chosen = [stage.repository(slug, slug) for slug in "abc"]
        together = threading.Barrier(2)

        def begin(order):
            together.wait(10)
            try:
                stage.start(*order)
            finally:
                connection.close()

        threads = [threading.Thread(target=begin, args=(order,)) for order in (chosen, chosen[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        found = RepositoryOutcome.objects.values_list("repository__slug", "status")
        assert sorted(found) == sorted([(slug, status_) for slug in "abc" for status_ in (S.PENDING, S.SKIPPED)])


class TestScanning:
    def test_no_more_at_once_than_the_run_may(self, stage):
        run = stage.start(*(stage.repository(slug, slug) for slug in "abc"), concurrency=2)
        stage.scan(run)
        assert sorted(run.outcomes.values_list("status", flat=True)) == [S.EMBEDDING, S.EMBEDDING, S.PENDING]
        assert TenantRun.objects.get(pk=run.pk).status == RunStatus.RUNNING
        assert stage.carry_out(run).status == RunStatus.COMPLETED

    def test_an_unreachable_source_is_deferred_and_deletes_nothing(self, stage):
        a = stage.repository("a", *texts("alpha", 2))
        stage.swept(a)
        stage.git["a"].path.rename(stage.folder / "away")
        run = stage.swept(a)
        assert outcome_of(run, a).status == S.DEFERRED
        assert outcome_of(run, a).error_code
        assert live_texts(a) == texts("alpha", 2)

    def test_a_missing_ref_fails(self, stage):
        a = stage.repository("a", "alpha", ref="nowhere")
        assert outcome_of(stage.swept(a), a).status == S.FAILED

    def test_an_error_of_our_own_ends_its_own_outcome_alone(self, stage, monkeypatch):
        a, b = stage.repository("a", "alpha"), stage.repository("b", "beta")
        real = sweep.scan.scan

        def scan(repository, *arguments):
            if repository.slug == "a":
                raise LookupError("a tenant's text")
            return real(repository, *arguments)

        monkeypatch.setattr(sweep.scan, "scan", scan)
        run = stage.swept(a, b)
        assert codes_of(outcome_of(run, a)) == (S.FAILED, codes.SCAN_FAILED, "")
        assert outcome_of(run, a).error_detail == "LookupError"
        assert (outcome_of(run, b).status, run.status) == (S.SUCCEEDED, RunStatus.DEGRADED)

    def test_a_lost_scan_is_pending_again_and_interrupted_the_third_time(self, stage):
        a = stage.repository("a", "alpha")
        run = stage.start(a)
        for losses in (1, 2):
            assert transitions.claim_scan(run.pk)
            RepositoryOutcome.objects.update(scan_lease_expires_at=PAST)
            sweep.advance(run.pk)
            outcome = outcome_of(run, a)
            assert (outcome.status, outcome.scan_losses) == (S.PENDING, losses)
        assert transitions.claim_scan(run.pk)
        RepositoryOutcome.objects.update(scan_lease_expires_at=PAST)
        assert sweep.advance(run.pk).status == RunStatus.INTERRUPTED
        assert codes_of(outcome_of(run, a)) == (S.INTERRUPTED, codes.SCAN_LOST, "")

    def test_a_scan_that_is_lost_after_the_circuit_opened_is_spared(self, stage):
        a, b = stage.repository("a", "alpha"), stage.repository("b", "beta")
        run = stage.start(a, b)
        assert sweep.scan_next(run.pk)
        assert transitions.claim_scan(run.pk)
        circuit.open_for(task_queue.admit(stage.provider.pk, lambda cap: 1, "fair"), TimedOut())
        assert outcome_of(run, b).status == S.SCANNING
        RepositoryOutcome.objects.update(scan_lease_expires_at=PAST)
        sweep.advance(run.pk)
        assert codes_of(outcome_of(run, b)) == (S.DEFERRED, codes.CIRCUIT_OPEN, "")

    def test_a_scan_that_ends_after_the_circuit_opened_is_spared(self, stage, monkeypatch):
        a, b = stage.repository("a", "alpha"), stage.repository("b", "beta")
        run = stage.start(a, b)
        assert sweep.scan_next(run.pk)
        real = sweep.scan.scan

        def opening(*arguments):
            result = real(*arguments)
            circuit.open_for(task_queue.admit(stage.provider.pk, lambda cap: 1, "fair"), TimedOut())
            return result

        monkeypatch.setattr(sweep.scan, "scan", opening)
        assert sweep.scan_next(run.pk)
        assert codes_of(outcome_of(run, b)) == (S.DEFERRED, codes.CIRCUIT_OPEN, "")
        assert KnowledgeRow.objects.filter(repository=b, vector=None).count() == 1

    def test_a_scan_whose_claim_was_lost_changes_nothing(self, stage, monkeypatch):
        a = stage.repository("a", "alpha")
        run = stage.start(a)
        real = sweep.scan.scan

        def losing(*arguments):
            result = real(*arguments)
            RepositoryOutcome.objects.update(scan_token="another's")
            return result

        monkeypatch.setattr(sweep.scan, "scan", losing)
        sweep.scan_next(run.pk)
        assert (outcome_of(run, a).status, outcome_of(run, a).scan_token) == (S.SCANNING, "another's")
        assert not EmbeddingTask.objects.exists()

    def test_a_stopping_worker_returns_its_scan_uncounted(self, stage):
        a = stage.repository("a", "alpha")
        run = stage.start(a)
        shutdown.requested.set()
        try:
            sweep.scan_next(run.pk)
        finally:
            shutdown.requested.clear()
        outcome = outcome_of(run, a)
        assert (outcome.status, outcome.scan_losses, outcome.scan_token) == (S.PENDING, 0, "")
        assert stage.carry_out(run).status == RunStatus.COMPLETED


def out_as_another_opened_the_circuit(stage, *b_texts):
    """The run, its repository `b` with these texts, and b's task: out as another one's timeout opened the circuit."""
    a, b = stage.repository("a", "alpha"), stage.repository("b", *b_texts)
    run = stage.start(a, b)
    stage.scan(run)
    of_a, of_b = two_dispatched(stage, outcome_of(run, a), outcome_of(run, b))
    circuit.open_for(of_a, TimedOut())
    task_queue.fail(of_a, TimedOut.code, "")
    return run, b, of_b


class TestEmbedding:
    def test_at_most_two_unsettled_tasks(self, stage):
        run = stage.start(stage.repository("a", *texts("alpha", 20)))
        stage.scan(run)
        assert EmbeddingTask.objects.count() == 2
        task = task_queue.admit(stage.provider.pk, lambda cap: 1, "fair")
        for _ in range(3):
            sweep.advance(run.pk)
        assert EmbeddingTask.objects.count() == 2
        task_queue.remove_held(task, "X")
        sweep.advance(run.pk)
        assert EmbeddingTask.objects.filter(state=TaskState.QUEUED).count() == 2

    def test_an_unchanged_repository_costs_no_call(self, stage):
        a = stage.repository("a", *texts("alpha", 3))
        stage.swept(a)
        calls = len(stage.server.embedding_calls)
        run = stage.swept(a)
        assert (outcome_of(run, a).status, run.status) == (S.UNCHANGED, RunStatus.COMPLETED)
        assert (outcome_of(run, a).rows, outcome_of(run, a).pending) == (3, 0)
        assert len(stage.server.embedding_calls) == calls

    def test_a_failure_that_is_no_texts_own_fails_the_outcome_and_removes_its_queue(self, stage):
        a = stage.repository("a", *texts("alpha", 12))
        stage.server.next(status(401))
        run = stage.swept(a)
        assert codes_of(outcome_of(run, a)) == (S.FAILED, codes.PROVIDER_FAILED, "PROVIDER_UNAUTHORIZED")
        assert len(stage.server.embedding_calls) == 1
        assert outcome_of(run, a).pending == 12

    def test_in_flight_work_that_stores_everything_succeeds_although_the_circuit_is_open(self, stage):
        run, b, of_b = out_as_another_opened_the_circuit(stage, "beta")
        task_queue.settle(of_b)
        task_queue.mark_stored(of_b)
        row = KnowledgeRow.objects.get(repository=b)
        with transaction.atomic():
            store.write_vectors(b.pk, [(row.pk, vector_of("beta", DIMENSIONS))])
        sweep.after_task(of_b)
        assert outcome_of(run, b).status == S.SUCCEEDED
        assert TenantRun.objects.get(pk=run.pk).status == RunStatus.DEGRADED

    def test_in_flight_work_with_more_to_do_gets_the_circuits_code_when_it_ends(self, stage):
        run, b, of_b = out_as_another_opened_the_circuit(stage, *texts("beta", 9))
        assert outcome_of(run, b).status == S.EMBEDDING
        task_queue.remove_held(of_b, "X")
        sweep.after_task(of_b)
        assert codes_of(outcome_of(run, b)) == (S.DEFERRED, codes.CIRCUIT_OPEN, "")

    def test_work_that_fails_while_its_outcome_is_looked_at_fails_under_its_own_name(self, stage, monkeypatch):
        run, b, of_b = out_as_another_opened_the_circuit(stage, *texts("beta", 9))
        refill = batches.refill

        def refill_as_the_reply_fails(outcome):
            task_queue.fail(of_b, "PROVIDER_STATUS", "")
            return refill(outcome)

        monkeypatch.setattr(batches, "refill", refill_as_the_reply_fails)
        sweep.advance(run.pk)
        assert codes_of(outcome_of(run, b)) == (S.FAILED, codes.PROVIDER_FAILED, "PROVIDER_STATUS")


class TestEnding:
    @pytest.mark.parametrize(
        ("statuses", "named"),
        [
            ([], RunStatus.COMPLETED),
            ([S.SUCCEEDED, S.UNCHANGED, S.SKIPPED], RunStatus.COMPLETED),
            ([S.FAILED], RunStatus.FAILED),
            ([S.INTERRUPTED], RunStatus.INTERRUPTED),
            ([S.DEFERRED], RunStatus.DEFERRED),
            ([S.CANCELLED], RunStatus.CANCELLED),
            ([S.DEFERRED, S.SUCCEEDED], RunStatus.DEGRADED),
            ([S.FAILED, S.DEFERRED], RunStatus.DEGRADED),
        ],
    )
    def test_a_run_is_named_by_its_outcomes(self, statuses, named):
        assert transitions.run_status(set(statuses), was_cancelled=False) == named
        assert transitions.run_status(set(statuses), was_cancelled=True) == RunStatus.CANCELLED

    def test_a_run_is_not_finished_before_what_its_outcomes_did_is_recorded(self, stage, monkeypatch):
        """Another process decides the last outcome between our recording and our finishing."""
        a = stage.repository("a", "alpha")
        run = stage.start(a)
        real = totals.record_decided

        def decided_just_after(of_run):
            real(of_run)
            RepositoryOutcome.objects.update(status=S.SUCCEEDED, finished_at=timezone.now())

        monkeypatch.setattr(totals, "record_decided", decided_just_after)
        sweep.advance(run.pk)
        monkeypatch.undo()
        assert TenantRun.objects.get(pk=run.pk).finished_at is None
        sweep.advance(run.pk)
        assert TenantRun.objects.get(pk=run.pk).status == RunStatus.COMPLETED
        assert outcome_of(run, a).is_recorded
        assert Repository.objects.get(pk=a.pk).next_due_at is not None

    def test_advancing_is_idempotent(self, stage):
        run = stage.swept(stage.repository("a", *texts("alpha", 3)))
        before = [list(model.objects.values()) for model in (TenantRun, RepositoryOutcome, EmbeddingTask, KnowledgeRow)]
        for _ in range(3):
            sweep.advance(run.pk)
        after = [list(model.objects.values()) for model in (TenantRun, RepositoryOutcome, EmbeddingTask, KnowledgeRow)]
        assert str(after) == str(before)


class TestCancelling:
    def test_a_run(self, stage):
        gate = Gate()
        stage.server.when(containing("alpha"), gated(gate))
        a, b, c = (
            stage.repository(slug, *texts(word, 9)) for slug, word in (("a", "alpha"), ("b", "beta"), ("c", "c"))
        )
        run = stage.start(a, b, c)
        stage.scan(run)
        with draining(stage):
            gate.wait_arrived()
            sweep.request_cancel(run)
        ended = sweep.advance(run.pk)
        assert (ended.status, ended.circuit.state) == (RunStatus.CANCELLED, CircuitState.CLOSED)
        assert {codes_of(outcome_of(run, each))[:2] for each in (a, b, c)} == {(S.CANCELLED, codes.RUN_CANCELLED)}
        assert len(stage.server.embedding_calls) == 1
        assert not EmbeddingTask.objects.filter(settled_at=None).exists()

    def test_one_repositorys_part(self, stage):
        a, b = stage.repository("a", *texts("alpha", 9)), stage.repository("b", *texts("beta", 9))
        run = stage.start(a, b)
        stage.scan(run)
        sweep.cancel_outcome(outcome_of(run, a))
        stage.carry_out(run)
        assert (outcome_of(run, a).status, outcome_of(run, b).status) == (S.CANCELLED, S.SUCCEEDED)
        assert run.status == RunStatus.DEGRADED

    def test_whatever_is_unfinished_of_a_repository(self, stage):
        a = stage.repository("a", "alpha")
        run = stage.start(a)
        sweep.cancel_repository(a)
        assert outcome_of(run, a).status == S.CANCELLED

    def test_what_is_decided_stays_decided(self, stage):
        a = stage.repository("a", "alpha")
        run = stage.swept(a)
        sweep.request_cancel(run)
        sweep.cancel_outcome(outcome_of(run, a))
        run.refresh_from_db()
        assert (outcome_of(run, a).status, run.status) == (S.SUCCEEDED, RunStatus.COMPLETED)

    def test_a_scan_that_is_at_work_stops(self, stage, monkeypatch):
        a = stage.repository("a", *texts("alpha", 6))
        run = stage.start(a)
        monkeypatch.setattr(sweep.scan, "_BATCH_FILES", 2)
        real = sweep.scan.store.write_versions
        written = []

        def cancelling(*arguments):
            written.append(real(*arguments))
            sweep.request_cancel(run)
            return written[-1]

        monkeypatch.setattr(sweep.scan.store, "write_versions", cancelling)
        sweep.scan_next(run.pk)
        assert (len(written), outcome_of(run, a).status) == (1, S.CANCELLED)


class TestAChangedModel:
    def test_a_run_under_way_is_put_off(self, stage):
        a, b = stage.repository("a", *texts("alpha", 9)), stage.repository("b", "beta")
        run = stage.start(a, b, concurrency=1)
        stage.scan(run)
        Provider.objects.update(embedding_model="another")
        stage.carry_out(run)
        assert {codes_of(outcome_of(run, each))[:2] for each in (a, b)} == {(S.DEFERRED, codes.GENERATION_CHANGED)}
        assert stage.server.embedding_calls == []


class TestDeciding:
    def test_once(self, transactional_db):
        outcome = make_outcome(make_run(), status=S.EMBEDDING)
        assert transitions.decide(outcome.pk, S.DEFERRED, code="FIRST")
        assert not transitions.decide(outcome.pk, S.FAILED, code="SECOND")
        outcome.refresh_from_db()
        assert (outcome.status, outcome.error_code) == (S.DEFERRED, "FIRST")

    def test_a_hanging_server_leaves_the_old_text_searchable(self, stage):
        a = stage.repository("a", *texts("alpha", 2))
        stage.swept(a)
        stage.git["a"].commit({"000.txt": "changed"})
        stage.server.script(lambda call: hang())
        stage.swept(a)
        assert live_texts(a) == texts("alpha", 2)
