"""What embedding servers and repositories really do, each through a real sweep, for every provider kind it concerns.

Every row of the table says what becomes of the repository, and how many calls the server counted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import numpy as np
import pytest

from embeddings import codes
from embeddings.models import EmbeddingTask, KnowledgeRow
from embeddings.states import ProviderKind
from tests.conftest import REPOSITORY_ROOT
from tests.support.factories import make_tenant
from tests.support.provider_server import ProviderServer, Reply, default, hang, status, unused_address, vector_of
from tests.support.sweeps import (
    DIMENSIONS,
    GEMINI,
    KEY,
    KINDS,
    LOCAL_KINDS,
    OLLAMA,
    OPENAI,
    Site,
    make_site,
    outcome_of,
    stored,
    texts,
)
from tests.wires.embedding_cases import (
    CASES,
    POISON,
    SHORT,
    TIMED_OUT,
    TIMEOUT_CODE,
    TIMES_OUT,
    Case,
    calls_of,
    documented,
    ends_of,
    in_turn,
    lands_of,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def server():
    with ProviderServer(dimensions=DIMENSIONS) as running:
        yield running


@pytest.fixture
def site_of(server, tmp_path, monkeypatch) -> Callable[..., Site]:
    monkeypatch.setenv(KEY, "key-of-tests")
    return functools.partial(make_site, server=server, folder=tmp_path)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        # What a server says is the same to each database: a case's first kind is enough for the second.
        pytest.param(
            case, kind, id=f"{case.number}, {kind}", marks=[pytest.mark.both_databases] * (kind == case.kinds[0])
        )
        for case in CASES
        for kind in case.kinds
    ],
)
def test_the_table(case: Case, kind: ProviderKind, site_of: Callable[..., Site]) -> None:
    site = site_of(kind, **case.provider)
    site.server.script(case.plan())
    repository = site.repository("docs", *texts(POISON, case.poison), *texts("plain", case.rows)[case.poison :])

    run = site.swept(repository)

    outcome = outcome_of(run, repository)
    lands = lands_of(case)
    ends = (outcome.status, outcome.error_code, outcome.source_error_code)
    assert ends == ends_of(case, kind), outcome.error_detail
    assert calls_of(case, kind) == len(site.server.embedding_calls) == outcome.provider_calls
    assert (stored(repository), outcome.embedded, outcome.undeliverable) == (lands, lands, case.undeliverable)
    assert outcome.pending == case.rows - lands - case.undeliverable
    assert case.detail in " ".join([outcome.error_detail, *_reasons(repository)])
    assert run.circuit.state == ("open" if case.ends is TIMES_OUT and kind != GEMINI else "closed")
    assert EmbeddingTask.objects.filter(state__in=(0, 1, 2)).count() == 0
    assert not EmbeddingTask.objects.filter(slot__isnull=False).exists()
    _each_row_has_its_own_vector(repository)


def _reasons(repository) -> list[str]:
    return list(KnowledgeRow.objects.filter(repository=repository).values_list("undeliverable_reason", flat=True))


def _each_row_has_its_own_vector(repository) -> None:
    for row in KnowledgeRow.objects.filter(repository=repository, vector__isnull=False):
        assert np.allclose(row.vector, vector_of(row.text, len(row.vector)), atol=1e-6)


@pytest.fixture(params=KINDS)
def site(request, site_of) -> Site:
    """A site of each kind."""
    return site_of(request.param)


@pytest.fixture
def lane_site(site_of) -> Site:
    return site_of(OPENAI)


@pytest.mark.both_databases
class TestTextsThatAreSent:
    def test_1_blank_text_is_never_sent(self, site: Site) -> None:
        repository = site.repository("docs", files={"blank.txt": " \n\n\t\n", "empty.txt": "", "full.txt": "full\n"})
        outcome = outcome_of(site.swept(repository), repository)
        assert (outcome.status, outcome.files, outcome.rows, outcome.embedded) == ("succeeded", 3, 1, 1)
        assert list(site.server.texts_seen) == ["full"]

    def test_15_batches_are_bounded_by_size_and_by_count(self, site: Site) -> None:
        site.configure(batch_size=4, batch_characters=100)
        long = {f"long-{number}.txt": f"{number}" * 60 for number in range(3)}
        repository = site.repository("docs", files=long | {f"s{number}.txt": f"short {number}" for number in range(9)})
        outcome = outcome_of(site.swept(repository), repository)
        sizes = [(len(call.texts), sum(map(len, call.texts))) for call in site.server.embedding_calls]
        assert (outcome.status, outcome.embedded) == ("succeeded", 12)
        assert all(count <= 4 and characters <= 100 for count, characters in sizes), sizes
        assert len(sizes) <= 6

    def test_a_text_over_the_bound_goes_alone(self, lane_site: Site) -> None:
        lane_site.configure(batch_characters=50)
        repository = lane_site.repository("docs", files={"a.txt": "a" * 60, "b.txt": "b", "c.txt": "c"})
        assert outcome_of(lane_site.swept(repository), repository).embedded == 3
        assert sorted(len(call.texts) for call in lane_site.server.embedding_calls) == [1, 2]

    def test_26_an_oversized_file_is_cut_before_anything_is_sent(self, lane_site: Site) -> None:
        lane_site.configure(chunk_characters=200)
        repository = lane_site.repository("docs", files={"long.txt": "".join(f"line {n} of it\n" for n in range(100))})
        outcome = outcome_of(lane_site.swept(repository), repository)
        assert outcome.rows > 5
        assert all(len(text) <= 200 for text in lane_site.server.texts_seen)

    def test_25_a_server_that_refuses_base64_is_asked_without_it_from_then_on(self, lane_site: Site) -> None:
        site = lane_site
        site.configure(batch_size=4)
        refusal = status(400, {"error": {"message": "unknown field encoding_format"}})
        site.server.script(lambda call: refusal if "encoding_format" in (call.body or {}) else None)
        repository = site.repository("docs", *texts("plain", 12))
        outcome = outcome_of(site.swept(repository), repository)
        assert (outcome.status, outcome.embedded, outcome.undeliverable) == ("succeeded", 12, 0)
        site.provider.refresh_from_db()
        assert site.provider.refuses_base64
        before = len(site.server.embedding_calls)
        site.git["docs"].commit({"new.txt": "new\n"})
        site.swept(repository)
        assert [call.texts for call in site.server.embedding_calls[before:]] == [("new",)]


@pytest.mark.both_databases
class TestResuming:
    def test_4_state_is_written_after_the_vectors(self, site: Site) -> None:
        site.configure(batch_size=2)
        site.server.script(in_turn(default(), default(), status(502))())
        repository = site.repository("docs", *texts("plain", 8))
        first = outcome_of(site.swept(repository), repository)
        assert (first.status, first.embedded, first.pending) == ("failed", stored(repository), 8 - stored(repository))
        assert stored(repository) >= 4
        refused = site.server.embedding_calls[2].texts

        second = outcome_of(site.swept(repository), repository)
        assert (second.status, second.embedded, second.pending) == ("succeeded", 8 - first.embedded, 0)
        assert {text for text, times in site.server.texts_seen.items() if times > 1} == set(refused)

    def test_5_a_hang_in_the_middle_is_resumed(self, site_of) -> None:
        site = site_of(OPENAI, batch_size=2, **SHORT)
        site.server.script(in_turn(default(), hang())())
        repository = site.repository("docs", *texts("plain", 6))
        first = outcome_of(site.swept(repository), repository)
        assert (first.status, first.error_code, first.embedded, first.pending) == ("deferred", TIMED_OUT, 2, 4)
        second = outcome_of(site.swept(repository), repository)
        assert (second.status, second.embedded, second.provider_calls) == ("succeeded", 4, 2)
        assert sorted(site.server.texts_seen.values()) == [1, 1, 1, 1, 2, 2]

    @pytest.mark.parametrize("kind", LOCAL_KINDS)
    def test_6_the_one_that_waited_has_its_own_outcome(self, kind, site_of) -> None:
        site = site_of(kind, **SHORT)
        site.server.script(in_turn(hang())())
        first, other = site.repository("a", *texts("alpha", 3)), site.repository("b", *texts("beta", 3))
        run = site.swept(first, other)
        one, two = outcome_of(run, first), outcome_of(run, other)
        assert (one.status, one.error_code, one.source_error_code) == ("deferred", TIMED_OUT, TIMEOUT_CODE[kind])
        assert (two.status, two.error_code, two.provider_calls) == ("deferred", codes.CIRCUIT_OPEN, 0)
        assert len(site.server.embedding_calls) == 1
        again = site.swept(first, other)
        assert [again.status, again.circuit.state, stored(first), stored(other)] == ["completed", "closed", 3, 3]

    def test_12_goes_on_where_the_provider_became_busy(self, site: Site) -> None:
        """As `Retry-After` says, as a date too."""
        site.configure(batch_size=2)
        counted = itertools.count(1)
        site.server.script(lambda call: _busy_for_two_seconds() if next(counted) == 4 else None)
        repository = site.repository("docs", *texts("plain", 10))
        outcome = outcome_of(site.swept(repository), repository)
        assert (outcome.status, outcome.embedded, outcome.provider_calls) == ("succeeded", 10, 6)
        calls = site.server.embedding_calls
        assert len(calls) == 6
        assert calls[4].arrived_at - calls[3].ended_at > 0.9
        assert sorted(site.server.texts_seen.values()) == [1] * 8 + [2] * 2

    def test_busy_for_too_long_is_put_off(self, site: Site, settings) -> None:
        settings.BUSY_RETRY_AFTER_MAX_MS = 10
        settings.BUSY_REQUEUES_MAX = 3
        site.server.when(lambda call: True, status(503, headers={"Retry-After": "86400"}))
        repository = site.repository("docs", *texts("plain", 2))
        run = site.swept(repository)
        outcome = outcome_of(run, repository)
        assert (outcome.status, outcome.error_code, outcome.provider_calls) == ("deferred", codes.PROVIDER_BUSY, 4)
        assert (run.circuit.state, outcome.pending) == ("closed", 2)

    def test_35_a_server_that_comes_up_late(self, lane_site: Site) -> None:
        """Refused first: the run ends with it. Loading next: the same call is tried again until the model is there."""
        address = unused_address()
        repository = lane_site.repository("docs", *texts("plain", 2))
        serving = lane_site.provider.base_url
        lane_site.configure(base_url=f"{address}/v1")
        assert outcome_of(lane_site.swept(repository), repository).source_error_code == "PROVIDER_UNREACHABLE"
        lane_site.configure(base_url=serving)
        loading = status(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
        lane_site.server.next(loading, loading)
        outcome = outcome_of(lane_site.swept(repository), repository)
        assert (outcome.status, outcome.provider_calls, stored(repository)) == ("succeeded", 3, 2)


def _busy_for_two_seconds() -> Reply:
    """A date has whole seconds: one second at least is left of two."""
    until = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    return status(429, headers={"Retry-After": until})


@pytest.mark.both_databases
class TestNoConnection:
    def test_27_refused_connections_cost_one_short_try_for_each_repository(self, site: Site) -> None:
        site.configure(base_url=unused_address() + site.provider.base_url.removeprefix(site.server.address))
        chosen = [site.repository(name, *texts(name, 40)) for name in ("a", "b", "c")]
        run = site.swept(*chosen)
        for repository in chosen:
            outcome = outcome_of(run, repository)
            assert (outcome.status, outcome.source_error_code) == ("failed", "PROVIDER_UNREACHABLE")
            assert outcome.provider_calls == 1
        assert (run.status, run.circuit.state) == ("failed", "closed")

    def test_9_a_server_that_accepts_and_never_reads(self, site_of) -> None:
        site = site_of(OLLAMA, **SHORT)
        site.server.accept_never()
        first, other = site.repository("a", *texts("alpha", 3)), site.repository("b", *texts("beta", 3))
        run = site.swept(first, other)
        assert (run.status, run.circuit.state, run.circuit.opened_by) == ("deferred", "open", str(first))
        assert site.server.connections_accepted == 1


@pytest.mark.both_databases
class TestFiles:
    def test_28_and_30_what_cannot_be_read_is_skipped_with_its_reason(self, lane_site: Site) -> None:
        files = {
            "nul.txt": b"a\0b",
            "western.txt": "caf\u00e9".encode("cp1252"),
            "many.txt": "gr\u00fc\u00df \u4e16\n",
            "plain.txt": "plain",
        }
        repository = lane_site.repository("docs", files=files)
        outcome = outcome_of(lane_site.swept(repository), repository)
        assert (outcome.status, outcome.rows, sum(outcome.skipped.values())) == ("succeeded", 2, 2)
        assert set(lane_site.server.texts_seen) == {"gr\u00fc\u00df \u4e16", "plain"}

    def test_31_what_is_gone_goes_and_an_unreachable_source_is_not_empty(self, lane_site: Site) -> None:
        repository = lane_site.repository("docs", *texts("plain", 3))
        lane_site.swept(repository)
        source = lane_site.git["docs"]
        source.remove("000.txt")
        outcome = outcome_of(lane_site.swept(repository), repository)
        assert (outcome.status, outcome.deleted, stored(repository)) == ("succeeded", 1, 2)
        source.path.rename(source.path.with_name("elsewhere"))
        outcome = outcome_of(lane_site.swept(repository), repository)
        assert (outcome.status, outcome.deleted, stored(repository)) == ("deferred", 0, 2)

    def test_32_the_same_slug_and_paths_in_two_tenants(self, lane_site: Site) -> None:
        other_tenant = make_tenant(embedding_provider=lane_site.provider)
        mine = lane_site.repository("docs", *texts("same", 3))
        theirs = lane_site.repository("docs", *texts("same", 3), tenant=other_tenant)
        run = lane_site.swept(mine, theirs)
        assert [outcome_of(run, each).reused for each in (mine, theirs)] == [0, 0]
        lane_site.git["docs"].remove("000.txt")
        lane_site.swept(mine)
        assert (stored(mine), stored(theirs)) == (2, 3)

    def test_36_only_what_changed_is_read_and_embedded(self, lane_site: Site) -> None:
        repository = lane_site.repository("docs", *texts("plain", 60))
        lane_site.swept(repository)
        lane_site.git["docs"].commit({f"{number:03}.txt": f"changed {number}\n" for number in (3, 30, 59)})
        before = len(lane_site.server.embedding_calls)
        outcome = outcome_of(lane_site.swept(repository), repository)
        (call,) = lane_site.server.embedding_calls[before:]
        assert sorted(call.texts) == ["changed 3", "changed 30", "changed 59"]
        assert (outcome.embedded, outcome.rows, outcome.provider_calls) == (3, 60, 1)
        unchanged = outcome_of(lane_site.swept(repository), repository)
        assert (unchanged.status, unchanged.provider_calls) == ("unchanged", 0)


def test_the_document_has_the_table() -> None:
    assert documented() in (REPOSITORY_ROOT / "docs" / "embedding_cases.md").read_text()
