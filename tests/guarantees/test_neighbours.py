"""Bounded neighbours (docs/neighbours.md): a real worker with a pool of four threads, beside servers and sources that hang."""

import socket

import pytest

from embeddings.models import TenantRun
from embeddings.runtime import valkey, wake_ups
from embeddings.states import OutcomeStatus
from tests.support.factories import make_repository
from tests.support.processes import QUEUES
from tests.support.provider_server import ProviderServer, hang
from tests.support.sweeps import DIMENSIONS, OPENAI, make_site, outcome_of, slots_taken, wait_finished
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases

POOL = 4
OWN_POOLS, ONE_POOL = "project", "tests.support.broken_workers.shares_one_pool"


@pytest.fixture
def servers():
    """A server that never answers, and one that does."""
    with ProviderServer(dimensions=DIMENSIONS) as hung, ProviderServer(dimensions=DIMENSIONS) as healthy:
        hung.script(lambda call: hang())
        yield hung, healthy


def hang_calls(server, folder, many, **provider):
    """So many providers at the server, each with a run whose one text is queued."""
    for number in range(many):
        base_url = f"{server.address}/{number}/v1"
        site = make_site(OPENAI, server, folder / f"hung-{number}", base_url=base_url, **provider)
        site.scan(site.start(site.repository("a", "alpha")))
        wake_ups.notify_workers_now(wake_ups.DRAIN, site.provider.pk)


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


@pytest.mark.parametrize(("application", "is_on_time"), [(OWN_POOLS, True), (ONE_POOL, False)], ids=["holds", "twin"])
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


@pytest.mark.parametrize(("application", "goes_on"), [(OWN_POOLS, True), (ONE_POOL, False)], ids=["holds", "twin"])
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
    scanning = lambda: sum(each.outcomes.filter(status=OutcomeStatus.SCANNING).count() for each in hanging)  # noqa: E731
    eventually(lambda: scanning() == (2 if goes_on else POOL), message="the scans hang")
    wake_ups.notify_workers_now(wake_ups.DRAIN, site.provider.pk)
    wait_finished(run)
    assert outcome_of(run, a).status == OutcomeStatus.SUCCEEDED
    assert (scanning() > 0) == goes_on
