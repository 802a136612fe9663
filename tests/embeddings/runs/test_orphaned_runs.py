"""A sweep whose only process was killed: the next one takes its repositories and goes on from the rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from django.utils import timezone

from embeddings import codes
from embeddings.models import TenantRun
from embeddings.runs import orphaned_runs, sweep, transitions
from embeddings.states import OUTCOME_UNFINISHED, OutcomeStatus, RunStatus, RunTrigger
from tests.conftest import REPOSITORY_ROOT
from tests.support.provider_server import Gate, ProviderServer, gated
from tests.support.sweeps import OPENAI, make_site, outcome_of, stored, texts

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def site(tmp_path):
    with ProviderServer(dimensions=8) as server:
        yield make_site(OPENAI, server, tmp_path, batch_size=4)


def unattended(run: TenantRun) -> TenantRun:
    """As it stands once nobody has renewed its lease for long enough."""
    TenantRun.objects.filter(pk=run.pk).update(alive_until=timezone.now() - timedelta(seconds=1))
    return run


class TestARunThatNobodyAttends:
    def test_is_interrupted_and_the_next_sweep_completes(self, site):
        repository = site.repository("docs", *texts("docs", 3))
        abandoned = unattended(site.start_and_scan(repository))
        run = site.swept(repository)
        assert outcome_of(run, repository).status == OutcomeStatus.SUCCEEDED
        outcome = outcome_of(abandoned, repository)
        assert (outcome.status, outcome.error_code) == (OutcomeStatus.INTERRUPTED, codes.RUN_ABANDONED)
        abandoned.refresh_from_db()
        assert abandoned.status == RunStatus.INTERRUPTED
        assert stored(repository) == 3

    def test_one_that_is_attended_keeps_its_repositories(self, site):
        repository = site.repository("docs", *texts("docs", 3))
        alive = unattended(site.start_and_scan(repository))
        transitions.heartbeat(alive.pk)
        (late,) = sweep.start([repository], trigger=RunTrigger.COMMAND)
        assert outcome_of(late, repository).status == OutcomeStatus.SKIPPED
        assert outcome_of(alive, repository).status in OUTCOME_UNFINISHED

    def test_twin_without_the_interruption_the_repository_stays_taken(self, site, monkeypatch):
        repository = site.repository("docs", *texts("docs", 3))
        unattended(site.start_and_scan(repository))
        monkeypatch.setattr(orphaned_runs, "interrupt", lambda run_id: False)
        (late,) = sweep.start([repository], trigger=RunTrigger.COMMAND)
        assert outcome_of(late, repository).status == OutcomeStatus.SKIPPED

    def test_a_live_scan_keeps_it_alive(self, site):
        repository = site.repository("docs", *texts("docs", 3))
        (run,) = sweep.start([repository], trigger=RunTrigger.COMMAND)
        assert transitions.claim_scan(run.pk) is not None
        unattended(run)
        assert not orphaned_runs.interrupt(run.pk)


class TestASweepKilledInTheMiddle:
    def test_the_next_sweep_waits_for_its_lease_and_completes(self, site, process_environment):
        repository = site.repository("docs", *texts("docs", 12))
        gate = Gate()
        site.server.next(gated(gate))
        environ = process_environment | {"LEASE_MS": "1500", "LEASE_RENEW_MS": "300"}
        first = sweep_command(environ)
        try:
            gate.wait_arrived(timeout=60)
        finally:
            os.kill(first.pid, signal.SIGKILL)
            first.communicate()
        second = sweep_command(environ)
        output, errors = second.communicate(timeout=90)
        gate.release()
        (run,) = json.loads(output)["runs"]
        assert [one["status"] for one in run["outcomes"]] == ["succeeded"], errors
        assert second.returncode == 0
        assert stored(repository) == 12
        assert max(site.server.texts_seen.values()) <= 2, "a kill buys no text more than twice"


def sweep_command(environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "manage.py", "sweep", "--json"],
        cwd=REPOSITORY_ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
