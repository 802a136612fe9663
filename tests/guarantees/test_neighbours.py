"""Bounded neighbours (docs/neighbours.md): a real worker with a pool of four threads, beside servers and sources that hang."""

import socket

import pytest

from embeddings.models import EmbeddingTask, TenantRun
from embeddings.runs import sweep
from embeddings.runtime import valkey, wake_ups
from embeddings.states import OutcomeStatus, TaskState
from tests.support.factories import make_repository
from tests.support.processes import QUEUES
from tests.support.provider_server import ProviderServer, hang
from tests.support.sweeps import DIMENSIONS, OLLAMA, OPENAI, make_site, outcome_of, slots_taken, texts, wait_finished
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases

POOL = 4
PROMPTLY_S = 3.0
CALLS = 3 * POOL
PROJECT = "project"
ONE_POOL = "tests.support.broken_workers.shares_one_pool"
CALLS_HOLD_THREADS = "tests.support.broken_workers.calls_hold_threads"


@pytest.fixture
def servers():
    """A server that never answers, and one that does."""
    with ProviderServer(dimensions=DIMENSIONS) as hung, ProviderServer(dimensions=DIMENSIONS) as healthy:
        hung.script(lambda call: hang())
        yield hung, healthy


def hang_calls(server, folder, many, **provider):
    """So many providers at the server, each with a run whose one text is queued; returns the runs."""
    runs = []
    for number in range(many):
        base_url = f"{server.address}/{number}/v1"
        site = make_site(OPENAI, server, folder / f"hung-{number}", base_url=base_url, **provider)
        runs.append(site.start_and_scan(site.repository("a", "alpha")))
        wake_ups.notify_workers_now(wake_ups.DRAIN, site.provider.pk)
    return runs


@pytest.fixture
def silent_source():
    """The address of a git server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"


def start_worker(fleet, application):
    """Starts a worker that has heard nothing of what was put so far."""
    valkey.client().delete(*QUEUES)
    fleet.start(application=application)


def last_seen(run):
    return TenantRun.objects.get(pk=run.pk).alive_until


@pytest.mark.parametrize(("application", "is_on_time"), [(PROJECT, True), (ONE_POOL, False)], ids=["holds", "twin"])
def test_beats_round_is_on_time_beside_calls_that_hang(
    transactional_db, servers, tmp_path, fleet, application, is_on_time
):
    """In the twin the round comes only once a call has timed out: a run that waits for it would count as abandoned."""
    hung, healthy = servers
    site = make_site(OPENAI, healthy, tmp_path)
    run = site.start(site.repository("b", "beta"))
    before = last_seen(run)
    start_worker(fleet, application)
    hang_calls(hung, tmp_path, POOL, embedding_timeout_ms=4_000)
    eventually(lambda: slots_taken() == POOL, message="all calls are out")
    wake_ups.notify_workers_now("embeddings.tick")
    eventually(lambda: last_seen(run) != before, timeout=20, message="the run is seen to")
    assert (slots_taken() == POOL) == is_on_time


@pytest.mark.parametrize(("application", "goes_on"), [(PROJECT, True), (ONE_POOL, False)], ids=["holds", "twin"])
def test_sources_that_hang_hold_no_other_work(
    transactional_db, servers, silent_source, tmp_path, fleet, monkeypatch, application, goes_on
):
    monkeypatch.setenv("SCAN_THREADS", "2")
    monkeypatch.setenv("SOURCE_DEADLINE_MS", "4000")
    site = make_site(OPENAI, servers[1], tmp_path)
    run = site.start_and_scan(a := site.repository("a", "alpha"))
    start_worker(fleet, application)
    hanging = [
        site.start(make_repository(site.tenant, source=f"{silent_source}/{number}.git")) for number in range(POOL)
    ]
    held = 2 if goes_on else POOL
    scanning = lambda: sum(each.outcomes.filter(status=OutcomeStatus.SCANNING).count() for each in hanging)  # noqa: E731
    eventually(lambda: scanning() == held, message="the scans hang")
    wake_ups.notify_workers_now(wake_ups.DRAIN, site.provider.pk)
    wait_finished(run)
    assert outcome_of(run, a).status == OutcomeStatus.SUCCEEDED
    assert (scanning() == held) == goes_on


def hang_in_ollama(server, folder, calls, **provider):
    """One native Ollama with so many slots, all of whose calls hang."""
    ollama = make_site(OLLAMA, server, folder / "ollama", max_in_flight=calls, batch_size=1, **provider)
    ollama.start_and_scan(ollama.repository("a", *texts("alpha", calls)))
    wake_ups.notify_workers_now(wake_ups.DRAIN, ollama.provider.pk)


class TestACallThatIsOutHoldsNoThread:
    @pytest.mark.parametrize(
        ("application", "is_spared"), [(PROJECT, True), (CALLS_HOLD_THREADS, False)], ids=["holds", "twin"]
    )
    def test_a_healthy_run_ends_beside_calls_that_hang(
        self, transactional_db, servers, tmp_path, fleet, application, is_spared
    ):
        """Three times as many calls as the pool has threads. In the twin the run ends once some have timed out."""
        hung, healthy = servers
        start_worker(fleet, application)
        hang_in_ollama(hung, tmp_path, CALLS // 2, embedding_timeout_ms=5_000)
        hang_calls(hung, tmp_path, CALLS // 2, embedding_timeout_ms=5_000)
        out = CALLS if is_spared else POOL
        eventually(lambda: hung.in_flight == out, message="the calls are out")
        site = make_site(OPENAI, healthy, tmp_path)
        run = site.start(b := site.repository("b", *texts("beta", 3)))
        wait_finished(run)
        assert outcome_of(run, b).status == OutcomeStatus.SUCCEEDED
        assert (hung.in_flight == out) == is_spared

    def test_it_is_broken_off_by_a_cancel_and_given_back_by_a_stop(self, transactional_db, servers, tmp_path, fleet):
        hung, _ = servers
        start_worker(fleet, PROJECT)
        cancelled, *others = hang_calls(hung, tmp_path, CALLS)
        eventually(lambda: hung.in_flight == CALLS, message="the calls are out")
        sweep.request_cancel(cancelled)
        eventually(lambda: hung.in_flight == slots_taken() == CALLS - 1, PROMPTLY_S, message="one is broken off")
        assert fleet.workers[0].terminate(timeout=5) == 0
        given_back = EmbeddingTask.objects.filter(run__in=others).values_list("state", "attempts", "losses", "slot")
        assert list(given_back) == [(TaskState.QUEUED, 0, 0, None)] * (CALLS - 1)
        assert not hung.in_flight
