"""A provider's model is swapped: generations, also in the middle of a run and between two models of one dimension.

Search asks one model for each repository, never mixes two, and is never empty meanwhile.
"""

from __future__ import annotations

import numpy as np
import pytest

from embeddings import codes
from embeddings.models import EmbeddingGeneration, KnowledgeRow
from embeddings.query.search import search
from embeddings.registry import set_provider
from embeddings.reports import facts
from tests.support.provider_server import Call, Gate, ProviderServer, default, gated, status, vectors, wrong_dimensions
from tests.support.sweeps import DIMENSIONS, KEY, KINDS, OLLAMA, Site, all_codes, make_site, outcome_of, stored, texts
from tests.support.threads import in_threads

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.both_databases]

OLD, NEW = "old-model", "new-model"


@pytest.fixture
def server():
    with ProviderServer(dimensions=DIMENSIONS) as running:
        running.script(lambda call: opposite() if model_of(call) == NEW else None)
        yield running


@pytest.fixture(params=KINDS)
def site(request, server, tmp_path, monkeypatch) -> Site:
    monkeypatch.setenv(KEY, "key-of-tests")
    return make_site(request.param, server, tmp_path, embedding_model=OLD, batch_size=4)


@pytest.fixture
def ollama(server, tmp_path) -> Site:
    return make_site(OLLAMA, server, tmp_path, embedding_model=OLD, batch_size=4)


def opposite():
    """The new model has as many dimensions, and means the opposite by each."""
    return vectors(lambda items: [{**item, "embedding": [-number for number in item["embedding"]]} for item in items])


def model_of(call: Call) -> str:
    if "requests" in call.body:
        return call.body["requests"][0]["model"].removeprefix("models/")
    return call.body["model"]


def swap(site: Site, model: str = NEW) -> None:
    set_provider(site.provider.name, {"embedding_model": model})
    site.provider.refresh_from_db()


def models_asked(site: Site, since: int) -> set[str]:
    return {model_of(call) for call in site.server.embedding_calls[since:]}


def found(site: Site, count: int = 20) -> list[str]:
    """The texts that a search finds, of which none may stand twice."""
    hits = [hit.text for hit in search(site.tenant, "alpha 1", limit=count)]
    assert len(hits) == len(set(hits))
    return hits


class TestBetweenTwoSweeps:
    def test_the_next_sweep_re_embeds_and_old_vectors_answer_until_then(self, site: Site) -> None:
        repository = site.repository("docs", *texts("alpha", 6))
        site.swept(repository)
        swap(site)
        calls = len(site.server.embedding_calls)
        assert found(site)[0] == "alpha 1"
        assert models_asked(site, calls) == {OLD}

        outcome = outcome_of(site.swept(repository), repository)
        assert (outcome.status, outcome.embedded, outcome.rows, outcome.pending) == ("succeeded", 6, 6, 0)
        calls = len(site.server.embedding_calls)
        assert found(site)[0] == "alpha 1"
        assert models_asked(site, calls) == {NEW}
        assert set(KnowledgeRow.objects.values_list("generation__model", flat=True)) == {NEW}

    def test_the_way_back_is_a_change_too(self, ollama: Site) -> None:
        repository = ollama.repository("docs", *texts("alpha", 3))
        for model in (OLD, NEW, OLD):
            swap(ollama, model)
            assert outcome_of(ollama.swept(repository), repository).embedded == 3
        assert found(ollama)[0] == "alpha 1"
        assert set(KnowledgeRow.objects.values_list("generation__model", flat=True)) == {OLD}

    def test_other_dimensions_are_learned_anew_and_shown(self, ollama: Site) -> None:
        repository = ollama.repository("docs", *texts("alpha", 3))
        ollama.swept(repository)
        assert facts.providers().get(pk=ollama.provider.pk).dimensions == DIMENSIONS
        swap(ollama)
        assert facts.providers().get(pk=ollama.provider.pk).dimensions is None
        ollama.server.script(lambda call: wrong_dimensions(16) if model_of(call) == NEW else None)
        assert outcome_of(ollama.swept(repository), repository).status == "succeeded"
        assert facts.providers().get(pk=ollama.provider.pk).dimensions == 16
        assert found(ollama)[0] == "alpha 1"

    def test_a_file_that_changed_meanwhile_is_read_once(self, ollama: Site) -> None:
        repository = ollama.repository("docs", *texts("alpha", 4))
        ollama.swept(repository)
        swap(ollama)
        ollama.git["docs"].commit({"000.txt": "beta\n"})
        outcome = outcome_of(ollama.swept(repository), repository)
        assert (outcome.embedded, outcome.rows) == (4, 4)
        assert sorted(found(ollama)) == ["alpha 1", "alpha 2", "alpha 3", "beta"]


class TestWhileTheNewGenerationIsIncomplete:
    @pytest.fixture
    def half_way(self, site: Site):
        """Six rows of the old model; four of the new one are embedded when its server fails."""
        repository = site.repository("docs", *texts("alpha", 6))
        site.swept(repository)
        swap(site)
        replies = [opposite(), status(502)]
        site.server.script(lambda call: replies.pop(0) if replies and model_of(call) == NEW else None)
        assert outcome_of(site.swept(repository), repository).status == "failed"
        return site, repository

    def test_search_answers_from_the_old_one_alone(self, half_way) -> None:
        site, repository = half_way
        assert stored(repository) == 10
        calls = len(site.server.embedding_calls)
        assert sorted(found(site)) == sorted(f"alpha {number}" for number in range(6))
        assert models_asked(site, calls) == {OLD}

    def test_the_next_sweep_embeds_what_is_missing(self, half_way) -> None:
        site, repository = half_way
        site.server.script(lambda call: opposite() if model_of(call) == NEW else None)
        outcome = outcome_of(site.swept(repository), repository)
        assert (outcome.status, outcome.embedded) == ("succeeded", 2)
        assert found(site)[0] == "alpha 1"
        assert stored(repository) == 6


class TestInTheMiddleOfARun:
    def test_what_is_out_is_stored_what_is_queued_is_put_off(self, site: Site) -> None:
        gate = Gate()
        site.server.script(lambda call: gated(gate) if "alpha 0" in call.texts else None)
        repository = site.repository("docs", *texts("alpha", 12))
        run = site.start_and_scan(repository)
        with in_threads() as submit:
            submit(site.drain)
            gate.wait_arrived()
            swap(site)
            gate.release()
        run = site.carry_out(run)
        assert all_codes(run, repository) == [("deferred", codes.GENERATION_CHANGED, "")]
        assert (run.status, run.circuit.state) == ("deferred", "closed")
        assert models_asked(site, 0) == {OLD}
        assert stored(repository) == 4
        assert len(found(site)) == 4

        site.server.script(lambda call: opposite() if model_of(call) == NEW else None)
        outcome = outcome_of(site.swept(repository), repository)
        assert (outcome.status, outcome.embedded, stored(repository)) == ("succeeded", 12, 12)
        assert len(found(site)) == 12

    def test_a_vector_of_one_model_is_never_a_row_of_another(self, site: Site) -> None:
        gate = Gate()
        site.server.next(gated(gate, default()))
        repository = site.repository("docs", *texts("alpha", 4))
        run = site.start_and_scan(repository)
        with in_threads() as submit:
            submit(site.drain)
            gate.wait_arrived()
            swap(site)
            gate.release()
        site.carry_out(run)
        site.swept(repository)
        for row in KnowledgeRow.objects.filter(generation__model=NEW).select_related("generation"):
            old = KnowledgeRow.objects.filter(generation__model=OLD, text_hash=row.text_hash).first()
            assert old is None or not np.allclose(old.vector, row.vector)
        assert EmbeddingGeneration.objects.count() == 2
