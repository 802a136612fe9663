"""Hosts whose clocks differ from the database's by 20 s: times that processes compare are the database's own.

Each lease and expiry here is far shorter than 20 s, so one that is written or read by a host's clock is lost at birth, or
never.
"""

import pytest
from django.db import connection

from embeddings.models import EmbeddingTask, RepositoryOutcome, TenantRun
from embeddings.runs import orphaned_runs
from embeddings.runs.follow import follow
from embeddings.runtime.clock import postgresql_lease_expiry
from embeddings.states import RunStatus, TaskState
from tests.support.processes import LEASES, Process
from tests.support.provider_server import Gate, containing, gated
from tests.support.sweeps import live_texts, texts
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases

SKEWS = {"behind": -20, "ahead": 20}


@pytest.fixture(autouse=True)
def _leases_can_be_lost(transactional_db, settings):
    """Gives this process the leases of the others, and waits until PostgreSQL has run for one: before that none is lost."""
    settings.LEASE_MS = int(LEASES["LEASE_MS"])
    if connection.vendor == "postgresql":
        eventually(_has_run_for_a_lease, message="PostgreSQL has run for a lease")


def _has_run_for_a_lease():
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT isfinite({postgresql_lease_expiry()})")
        return cursor.fetchone()[0]


@pytest.fixture(params=SKEWS)
def host(request):
    """Whether the host's clock is behind or ahead of the database's."""
    return request.param


@pytest.fixture
def on_skewed_host(request, transactional_db):
    """Runs a command to its end on a host whose clock is so many seconds ahead; returns its output and exit status."""

    def run(seconds, *words):
        process = Process(f"skewed-{request.node.name}", "tests.support.skewed_clock", str(seconds), *words, **LEASES)
        try:
            eventually(lambda: process.returncode is not None, timeout=60, message=f"{words} ends")
        finally:
            process.kill()
        return process.output, process.returncode

    return run


def a_whole_run(stage, run, repository, count):
    """Completed, nothing lost on the way, and each text bought once."""
    assert TenantRun.objects.get(pk=run.pk).status == RunStatus.COMPLETED
    assert live_texts(repository) == texts("alpha", count)
    assert {stage.server.texts_seen[text] for text in texts("alpha", count)} == {1}
    assert set(EmbeddingTask.objects.values_list("losses", flat=True)) == {0}
    assert set(RepositoryOutcome.objects.values_list("scan_losses", flat=True)) == {0}


class TestAWorker:
    def test_sweeps_beside_one_with_the_databases_clock(self, stage, fleet, host):
        alpha = stage.repository("a", *texts("alpha", 12))
        fleet.start(1, f"tests.support.broken_workers.clock_{host}")
        fleet.start(1)
        run = stage.start(alpha)
        follow([run])
        a_whole_run(stage, run, alpha, 12)

    def test_takes_no_work_from_another_and_loses_none_of_its_own(self, stage, fleet, host):
        """One call is at the provider; the process that did not make it looks for lost leases again and again."""
        alpha = stage.repository("a", *texts("alpha", 4))
        stage.configure(embedding_timeout_ms=30_000)
        gate = Gate()
        stage.server.when(containing("alpha 0"), gated(gate), times=1)
        fleet.start(1, f"tests.support.broken_workers.clock_{host}")
        run = stage.start(alpha)
        gate.wait_arrived()
        first = EmbeddingTask.objects.get().lease_expires_at
        fleet.start(1)
        eventually(lambda: EmbeddingTask.objects.get().lease_expires_at > first, message="the lease is renewed")
        stage.drain()
        assert EmbeddingTask.objects.get().state == TaskState.DISPATCHED
        assert orphaned_runs.orphaned_runs() == []
        gate.release()
        follow([run])
        a_whole_run(stage, run, alpha, 4)


class TestACommand:
    def test_sweeps(self, stage, on_skewed_host, host):
        alpha = stage.repository("a", *texts("alpha", 6))
        output, status = on_skewed_host(SKEWS[host], "sweep")
        assert status == 0, output
        a_whole_run(stage, TenantRun.objects.get(), alpha, 6)

    def test_starts_a_run_that_is_not_orphaned_at_birth(self, stage, on_skewed_host, host):
        stage.repository("a", *texts("alpha", 2))
        output, status = on_skewed_host(SKEWS[host], "sweep", "--detach")
        assert status == 0, output
        assert TenantRun.objects.get().status == RunStatus.QUEUED
        assert orphaned_runs.orphaned_runs() == []

    def test_the_twin_with_pythons_clock_it_is(self, stage, on_skewed_host):
        stage.repository("a", *texts("alpha", 2))
        output, status = on_skewed_host(SKEWS["behind"], "--broken", "sweep", "--detach")
        assert status == 0, output
        assert orphaned_runs.orphaned_runs() == [TenantRun.objects.get()]


class TestAnInteractiveText:
    def test_is_embedded(self, stage, on_skewed_host, host):
        output, status = on_skewed_host(SKEWS[host], "embed", stage.provider.name, "a question")
        assert (status, output.splitlines()[-1:]) == (0, ["(1, 8)"]), output

    def test_the_twin_with_pythons_clock_it_expires_at_birth(self, stage, on_skewed_host):
        output, status = on_skewed_host(SKEWS["behind"], "--broken", "embed", stage.provider.name, "a question")
        assert status != 0
        assert "TaskExpired" in output
        assert stage.server.texts_seen["a question"] == 0
