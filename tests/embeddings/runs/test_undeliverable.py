"""Rows whose text the provider refuses: listed with their reason, tried again on demand and when the provider changes."""

from __future__ import annotations

import pytest

from embeddings.models import FileVersion
from embeddings.query.search import search
from embeddings.registry import set_provider
from tests.support.commanding import manage
from tests.support.provider_server import ProviderServer, containing, status
from tests.support.sweeps import DIMENSIONS, LOCAL_KINDS, Site, files_of, make_site, outcome_of, stored, texts

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.both_databases]


@pytest.fixture
def server():
    with ProviderServer(dimensions=DIMENSIONS) as running:
        yield running


@pytest.fixture(params=LOCAL_KINDS)
def site(request, server, tmp_path) -> Site:
    return make_site(request.param, server, tmp_path)


@pytest.fixture
def refused(site: Site):
    """Five rows, one of which the provider refuses."""
    site.server.when(containing("poison"), status(400, {"error": "the text is too long"}))
    repository = site.repository("docs", files=files_of(texts("plain", 4)) | {"bad.txt": "first line\npoison\n"})
    outcome = outcome_of(site.swept(repository), repository)
    assert (outcome.status, outcome.undeliverable, stored(repository)) == ("succeeded", 1, 4)
    return repository


class TestListed:
    def test_with_reason_place_and_text(self, site: Site, refused) -> None:
        (row,) = manage("rows", "undeliverable", "--json").json["rows"]
        assert (row["tenant"], row["repository"], row["path"]) == (site.tenant.slug, "docs", "bad.txt")
        assert (row["start_line"], row["text"]) == (1, "first line\npoison")
        assert "400" in row["reason"]
        assert "the text is too long" in row["reason"]
        table = manage("rows", "undeliverable", "--tenant", site.tenant.slug).out
        assert "bad.txt:1-2" in table

    def test_the_file_is_live_without_it_and_search_does_not_find_it(self, site: Site, refused) -> None:
        assert not FileVersion.objects.filter(is_live=False).exists()
        assert len(search(site.tenant, "plain 1", limit=10)) == 4

    def test_an_unchanged_sweep_leaves_it_alone(self, site: Site, refused) -> None:
        outcome = outcome_of(site.swept(refused), refused)
        assert (outcome.status, outcome.provider_calls, outcome.undeliverable) == ("unchanged", 0, 1)


class TestTriedAgain:
    def test_on_demand(self, site: Site, refused) -> None:
        said = manage("rows", "retry", "--repository", f"{site.tenant.slug}/docs").out
        assert said.startswith("1 rows are tried again")
        site.server.clear_script()
        outcome = outcome_of(site.swept(refused), refused)
        assert (outcome.status, outcome.embedded, outcome.undeliverable, stored(refused)) == ("succeeded", 1, 0, 5)
        assert len(search(site.tenant, "plain 1", limit=10)) == 5

    def test_and_refused_again(self, site: Site, refused) -> None:
        manage("rows", "retry", "--tenant", site.tenant.slug)
        outcome = outcome_of(site.swept(refused), refused)
        assert (outcome.undeliverable, outcome.pending, stored(refused)) == (1, 0, 4)
        # Alone, and the control: the refused text is no worse than it was.
        assert outcome.provider_calls <= 3

    @pytest.mark.parametrize(
        "change",
        [{"batch_size": 16}, {"batch_characters": 500}, {"chunk_characters": 600}, {"chunk_tokens": 100}],
        ids=repr,
    )
    def test_when_the_limits_change(self, change: dict, site: Site, refused) -> None:
        set_provider(site.provider.name, change)
        site.server.clear_script()
        outcome = outcome_of(site.swept(refused), refused)
        assert (outcome.status, outcome.undeliverable, stored(refused)) == ("succeeded", 0, 5)

    def test_when_the_model_changes(self, site: Site, refused) -> None:
        set_provider(site.provider.name, {"embedding_model": "larger"})
        site.provider.refresh_from_db()
        site.server.clear_script()
        outcome = outcome_of(site.swept(refused), refused)
        assert (outcome.status, outcome.undeliverable, outcome.embedded, stored(refused)) == ("succeeded", 0, 5, 5)

    def test_not_when_something_else_changes(self, site: Site, refused) -> None:
        set_provider(site.provider.name, {"stream_idle_timeout_ms": 1_000})
        assert outcome_of(site.swept(refused), refused).status == "unchanged"
