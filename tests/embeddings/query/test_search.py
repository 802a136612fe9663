"""Search: exact, over the tenant's own live rows, without any worker and without Valkey."""

import numpy as np
import pytest

from embeddings import registry
from embeddings.errors import EmbeddingFailed, UsageError
from embeddings.models import KnowledgeRow, Provider, Repository
from embeddings.query import vector_cache
from embeddings.query.search import search
from embeddings.runtime import valkey
from tests.support.factories import make_provider, make_tenant
from tests.support.provider_server import containing, hang, status, unused_port, vector_of
from tests.support.sweeps import DIMENSIONS, texts

pytestmark = pytest.mark.both_databases


@pytest.fixture
def answered(stage):
    """A repository of eight texts, embedded."""
    repository = stage.repository("a", *texts("alpha", 8))
    stage.swept(repository)
    return repository


def expected(query, count):
    scores = {text: float(vector_of(text, DIMENSIONS) @ vector_of(query, DIMENSIONS)) for text in texts("alpha", 8)}
    return sorted(scores.items(), key=lambda item: -item[1])[:count]


class TestAnswers:
    def test_are_the_nearest_best_first(self, stage, answered):
        hits = search(stage.tenant, "alpha 3", 4)
        assert [hit.text for hit in hits] == [text for text, _ in expected("alpha 3", 4)]
        assert np.allclose([hit.score for hit in hits], [score for _, score in expected("alpha 3", 4)], atol=1e-3)
        best = hits[0]
        assert (best.repository, best.path, best.start_line, best.end_line) == ("a", "003.txt", 1, 1)

    def test_follow_a_change(self, stage, answered):
        search(stage.tenant, "alpha 3")
        stage.git["a"].commit({"003.txt": "gamma"})
        stage.swept(answered)
        assert search(stage.tenant, "gamma", 1)[0].text == "gamma"
        assert "alpha 3" not in [hit.text for hit in search(stage.tenant, "alpha 3", 100)]

    def test_leave_out_what_is_pending_and_what_was_removed(self, stage, answered):
        stage.git["a"].commit({"new.txt": "beta"})
        stage.server.when(containing("beta"), hang(), times=1)
        stage.swept(answered)
        assert KnowledgeRow.objects.filter(text="beta").exists()
        assert len(search(stage.tenant, "words", 100)) == 8
        registry.remove_repository(answered)
        assert search(stage.tenant, "words") == []

    def test_of_nothing_are_empty_and_cost_no_call(self, stage):
        assert search(stage.tenant, "words") == []
        assert stage.server.embedding_calls == []

    @pytest.mark.parametrize(("query", "limit"), [("", 5), (" \n", 5), ("x" * 8_001, 5), ("x", 0), ("x", 101)])
    def test_are_refused_for_nonsense(self, stage, query, limit):
        with pytest.raises(UsageError):
            search(stage.tenant, query, limit)

    def test_of_a_broken_provider_are_its_error(self, stage, answered):
        stage.server.script(lambda call: status(401))
        with pytest.raises(EmbeddingFailed) as raised:
            search(stage.tenant, "words")
        assert raised.value.code == "PROVIDER_UNAUTHORIZED"


def test_without_valkey_the_row_alone_tells(stage, answered, settings, monkeypatch):
    settings.REDIS_URL = f"redis://127.0.0.1:{unused_port()}/0"
    monkeypatch.setattr(valkey, "_clients", {})
    assert search(stage.tenant, "alpha 3", 1)[0].text == "alpha 3"


class TestTenants:
    def test_see_their_own_rows_alone_under_the_same_slugs_and_paths(self, stage, answered):
        other = make_tenant(embedding_provider=stage.provider)
        theirs = stage.repository("a", "alpha 3", "secret", tenant=other)
        stage.swept(theirs)
        assert "secret" not in [hit.text for hit in search(stage.tenant, "secret", 100)]
        assert {hit.text for hit in search(other, "alpha 3", 100)} == {"alpha 3", "secret"}
        assert len(search(stage.tenant, "alpha 3", 100)) == 8


class TestGenerations:
    def test_are_never_mixed_and_never_empty(self, stage, answered):
        """After a model change the older one answers, asked with its own model, until the newer is whole."""
        Provider.objects.update(embedding_model="newer", revision=50)
        stage.server.when(containing("alpha 4"), hang(), times=1)
        stage.swept(answered)
        assert len(search(stage.tenant, "words", 100)) == 8
        assert stage.server.embedding_calls[-1].body["model"] == "embed"
        stage.swept(answered)
        hits = search(stage.tenant, "words", 100)
        assert len(hits) == 8
        assert stage.server.embedding_calls[-1].body["model"] == "newer"

    def test_of_two_providers_answer_side_by_side(self, stage, answered):
        other = make_provider(base_url=f"{stage.server.address}/other/v1", embedding_model="wide")
        type(stage.tenant).objects.filter(pk=stage.tenant.pk).update(embedding_provider=other)
        b = stage.repository("b", "beta")
        stage.swept(b)
        assert {hit.repository for hit in search(stage.tenant, "words", 4)} == {"a", "b"}
        assert Repository.objects.values("live_generation").distinct().count() == 2


def test_the_cache_is_bounded_in_bytes(stage, answered, settings):
    settings.SEARCH_CACHE_BYTES = 10
    vector_cache._cache.clear()
    assert len(search(stage.tenant, "words", 100)) == 8
    assert len(vector_cache._cache) == 0
