"""G8, G9 and G12 where one process is enough, each beside its twin (docs/architecture.md, Guarantees)."""

import pytest

from embeddings import codes, registry
from embeddings.dispatch import task_queue
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, KnowledgeRow, RepositoryOutcome, RunCircuit, TenantRun
from embeddings.registry.access import NotFound
from embeddings.reports import tenant_runs
from embeddings.runs import retention, scan, sweep
from embeddings.states import CircuitState, OutcomeStatus, RunStatus, TaskState
from tests.support.factories import make_tenant
from tests.support.provider_server import containing, hang
from tests.support.sweeps import live_texts, outcome_of, texts

pytestmark = pytest.mark.both_databases

PAST = "2000-01-01T00:00Z"


class TestG8:
    @pytest.fixture
    def after_an_open_circuit(self, stage):
        """A repository of ten texts whose second batch timed out."""
        repository = stage.repository("a", *texts("alpha", 10))
        stage.server.when(containing("alpha 4"), hang(), times=1)
        run = stage.swept(repository)
        assert run.circuit.state == CircuitState.OPEN
        return repository

    def bought(self, stage):
        return sorted(stage.server.texts_seen.values())

    def test_the_next_run_is_closed_and_embeds_what_is_missing(self, stage, after_an_open_circuit):
        run = stage.swept(after_an_open_circuit)
        assert (run.circuit.state, run.status) == (CircuitState.CLOSED, RunStatus.COMPLETED)
        assert live_texts(after_an_open_circuit) == texts("alpha", 10)
        # The four of the batch that timed out were sent twice, and nothing else.
        assert self.bought(stage) == [1] * 6 + [2] * 4

    def test_twin_an_inherited_circuit_keeps_the_repository_out(self, stage, after_an_open_circuit):
        run = stage.start(after_an_open_circuit)
        RunCircuit.objects.filter(run=run).update(state=CircuitState.OPEN)
        TenantRun.objects.filter(pk=run.pk).update(dispatch_allowed=False)
        RepositoryOutcome.objects.filter(run=run).update(status=OutcomeStatus.EMBEDDING)
        calls = len(stage.server.embedding_calls)
        stage.carry_out(run)
        assert outcome_of(run, after_an_open_circuit).error_code == codes.CIRCUIT_OPEN
        assert len(stage.server.embedding_calls) == calls

    def test_twin_a_scan_that_does_not_ask_the_rows_buys_everything_again(
        self, stage, after_an_open_circuit, monkeypatch
    ):
        monkeypatch.setattr(scan, "_is_current", lambda *_: False)
        monkeypatch.setattr(store, "known_vectors", lambda *_: {})
        stage.swept(after_an_open_circuit)
        assert self.bought(stage) == [1] * 2 + [2] * 8


class TestG9:
    @pytest.fixture
    def held_by_the_dead(self, stage):
        """A run whose first task is held by nobody any more."""
        repository = stage.repository("a", *texts("alpha", 6))
        run = stage.start(repository)
        stage.scan(run)
        task_queue.admit(stage.provider.pk, lambda cap: 1, "fair")
        EmbeddingTask.objects.filter(state=TaskState.DISPATCHED).update(lease_expires_at=PAST)
        return stage, run, repository

    def test_the_lease_runs_out_and_the_run_completes(self, held_by_the_dead):
        stage, run, repository = held_by_the_dead
        stage.carry_out(run)
        assert live_texts(repository) == texts("alpha", 6)

    def test_twin_without_reclaiming_the_lane_stands_for_ever(self, held_by_the_dead, monkeypatch):
        stage, run, _ = held_by_the_dead
        monkeypatch.setattr(task_queue, "_reclaim", lambda *_: None)
        for _ in range(3):
            assert sweep.drain(stage.provider.pk) == 0
            sweep.advance(run.pk)
        assert stage.server.embedding_calls == []

    def test_a_store_that_is_broken_off_leaves_nothing_behind(self, stage, monkeypatch):
        repository = stage.repository("a", *texts("alpha", 4))
        run = stage.start(repository)
        stage.scan(run)

        class Killed(BaseException):
            pass

        def killed(*_):
            raise Killed

        monkeypatch.setattr(store, "_publish_complete", killed)
        with pytest.raises(Killed):
            sweep.drain(stage.provider.pk)
        monkeypatch.undo()
        assert not KnowledgeRow.objects.exclude(vector=None).exists()
        assert (EmbeddingTask.objects.get().state, outcome_of(run, repository).embedded) == (TaskState.ANSWERED, 0)
        EmbeddingTask.objects.update(lease_expires_at=PAST)
        stage.carry_out(run)
        assert live_texts(repository) == texts("alpha", 4)
        assert outcome_of(run, repository).embedded == 4


class TestG12:
    @pytest.fixture
    def neighbours(self, stage):
        """Two tenants at one provider, with the same slug and the same paths, in one run."""
        other = make_tenant(embedding_provider=stage.provider)
        mine, theirs = (
            stage.repository("docs", *texts("mine", 3)),
            stage.repository("docs", *texts("theirs", 5), tenant=other),
        )
        return stage, stage.tenant, other, mine, theirs

    def test_a_run_is_seen_as_ones_own_part_of_it(self, neighbours):
        stage, tenant, other, mine, theirs = neighbours
        run = stage.swept(mine, theirs)
        shown = tenant_runs.show(tenant, run.public_id)
        assert [(each["tenant"], each["rows"]) for each in shown["outcomes"]] == [(tenant.slug, 3)]
        assert other.slug not in str(shown)
        assert [each["rows"] for each in tenant_runs.newest(other, 5)[0]["outcomes"]] == [5]

    def test_who_opened_the_circuit_is_not_told(self, neighbours):
        stage, tenant, other, mine, theirs = neighbours
        stage.server.when(containing("theirs"), hang())
        run = stage.swept(mine, theirs)
        assert run.circuit.opened_by == str(theirs)
        shown = tenant_runs.show(tenant, run.public_id)
        assert shown["circuit"]["state"] == CircuitState.OPEN
        assert other.slug not in str(shown)

    def test_anothers_run_is_not_found(self, neighbours):
        stage, tenant, _, _, theirs = neighbours
        run = stage.start(theirs)
        for verb in (tenant_runs.show, tenant_runs.cancel):
            with pytest.raises(NotFound):
                verb(tenant, run.public_id)
        assert outcome_of(run, theirs).status == OutcomeStatus.PENDING

    def test_a_cancel_stops_ones_own_part(self, neighbours):
        stage, tenant, _, mine, theirs = neighbours
        run = stage.start(mine, theirs)
        stage.scan(run)
        tenant_runs.cancel(tenant, run.public_id)
        stage.carry_out(run)
        assert outcome_of(run, mine).status == OutcomeStatus.CANCELLED
        assert outcome_of(run, theirs).status == OutcomeStatus.SUCCEEDED

    def test_twin_a_cancel_that_is_not_scoped_stops_the_neighbour(self, neighbours, monkeypatch):
        stage, tenant, _, mine, theirs = neighbours
        run = stage.start(mine, theirs)
        monkeypatch.setattr(tenant_runs, "_own", lambda tenant, run: run.outcomes.all())
        tenant_runs.cancel(tenant, run.public_id)
        assert outcome_of(run, theirs).status == OutcomeStatus.CANCELLED

    def test_removing_and_purging_leaves_the_neighbours_rows(self, neighbours):
        stage, _, _, mine, theirs = neighbours
        stage.swept(mine, theirs)
        registry.remove_repository(mine)
        retention.purge()
        assert not KnowledgeRow.objects.filter(repository=mine).exists()
        assert live_texts(theirs) == texts("theirs", 5)

    def test_equal_texts_are_bought_by_each(self, neighbours):
        stage, _, other, _, _ = neighbours
        one, two = stage.repository("same", "shared"), stage.repository("same", "shared", tenant=other)
        stage.swept(one, two)
        assert stage.server.texts_seen["shared"] == 2

    def test_tries_of_undeliverable_rows_are_ones_own(self, neighbours):
        stage, _, _, mine, theirs = neighbours
        stage.swept(mine, theirs)
        KnowledgeRow.objects.update(vector=None, undeliverable_reason="refused")
        assert store.retry_undeliverable(mine) == 3
        assert KnowledgeRow.objects.filter(undeliverable_reason="refused").count() == 5
