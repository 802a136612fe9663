"""G14: a database that goes away costs time, never truth (docs/outages.md).

It brings a PostgreSQL of its own, and so runs once, whatever database the run is tried on. All steps share one outage:
each sweep waits at its own. `OUTAGES_TABLE=FILE` takes the longest outage at every step, and writes the results to the file.
"""

import contextlib
import os
import time
from pathlib import Path

import pytest
from django.conf import settings

from embeddings import codes
from embeddings.runtime import valkey
from embeddings.states import OutcomeStatus
from project.runtime.embedded import hold_valkey
from tests.support import outages
from tests.support.outages import CALL_OUT, STEPS, TIMED_OUT_STEPS, HeldSweep, wait_ended
from tests.support.processes import LEASES, QUEUES, Worker
from tests.support.restartable_postgres import as_default_database
from tests.support.sweeps import calls_with, live_texts, texts

pytestmark = pytest.mark.timeout(300)

A_TIMED_OUT_B_SPARED = {
    "a": (OutcomeStatus.DEFERRED, codes.PROVIDER_TIMED_OUT),
    "b": (OutcomeStatus.DEFERRED, codes.CIRCUIT_OPEN),
}
BOTH_SUCCEEDED = {"a": (OutcomeStatus.SUCCEEDED, ""), "b": (OutcomeStatus.SUCCEEDED, "")}
# `manage.py sweep --help`
SOME_DEFERRED = 3
LONGEST_S = 20.0
TABLE = os.environ.get("OUTAGES_TABLE")
CASES = [
    *((seconds, step) for seconds in (0.5, 3.0) for step in STEPS),
    *((LONGEST_S, step) for step in (STEPS if TABLE else (CALL_OUT, "final timeout"))),
]


@pytest.fixture(scope="module")
def postgres(django_db_blocker):
    hold_valkey(settings.VAR_DIR)
    with django_db_blocker.unblock(), as_default_database() as postgres:
        yield postgres


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("outages")


@pytest.fixture(scope="module")
def results():
    """What each outage ended in, by its seconds."""
    by_outage = {}
    yield by_outage
    if TABLE:
        outages.write_table(Path(TABLE), by_outage)


@pytest.fixture(scope="module")
def outage(postgres, folder, results):
    """How a sweep ended for each step, by the outage's seconds; each outage is gone through once."""
    with contextlib.ExitStack() as stack:

        def go_through(seconds):
            if seconds not in results:
                steps = [step for each, step in CASES if each == seconds]
                sweeps = [HeldSweep(step, folder / f"{step} {seconds}") for step in steps]
                for one in sweeps:
                    stack.callback(one.end)
                    one.start()
                for one in sweeps:
                    one.wait_arrived()
                away(postgres, seconds, sweeps)
                results[seconds] = dict(zip(steps, wait_ended(*sweeps), strict=True))
            return results[seconds]

        yield go_through


@pytest.fixture
def held(postgres, tmp_path):
    """Makes one sweep that waits at its step."""
    with contextlib.ExitStack() as stack:

        def make(step, name="sweep", **environ):
            made = HeldSweep(step, tmp_path / name, **environ)
            stack.callback(made.end)
            return made

        yield make


def away(postgres, seconds, sweeps):
    """Takes the database away, lets each sweep go on without it, and brings it back."""
    postgres.stop()
    stopped = time.monotonic()
    for one in sweeps:
        one.release()
    # The outage itself.
    time.sleep(max(0.0, stopped + seconds - time.monotonic()))
    postgres.start()


def assert_truth(ended, step):
    """The right outcomes by the right codes, no text sent twice, and no call that the client broke off."""
    if step in TIMED_OUT_STEPS:
        assert (ended.outcomes, ended.status) == (A_TIMED_OUT_B_SPARED, SOME_DEFERRED), ended.err
        *before, last = ended.calls
        # A's one call, which its own deadline ended. B makes none after it.
        assert last == (tuple(texts("alpha", 4)), "client_closed")
        # Workers scan side by side: B may have been the first at the provider.
        assert before in ([], [(tuple(texts("beta", 4)), "replied")])
        return
    assert (ended.outcomes, ended.status) == (BOTH_SUCCEEDED, 0), ended.err
    refused = 4 if step == "busy reply" else 0
    bought = ended.site.server.texts_seen
    assert [bought[text] for text in texts("alpha", 6)] == [2] * refused + [1] * (6 - refused)
    assert [bought[text] for text in texts("beta", 6)] == [1] * 6
    assert {ended_by for _, ended_by in ended.calls} == {"replied"}
    for repository in ended.site.tenant.repositories.order_by("slug"):
        assert live_texts(repository) == texts({"a": "alpha", "b": "beta"}[repository.slug], 6)


class TestG14ARestart:
    @pytest.mark.parametrize(("seconds", "step"), CASES)
    def test_at_each_step_costs_time_alone(self, outage, seconds, step):
        assert_truth(outage(seconds)[step], step)

    def test_at_a_final_timeout_in_a_worker(self, postgres, held, monkeypatch):
        """The worker waits at the step; the sweep follows it, and makes no call of its own."""
        valkey.client().delete(*QUEUES)
        sweep = held("final timeout")
        for name, value in sweep.environ.items():
            monkeypatch.setenv(name, value)
        worker = Worker("tests.support.broken_workers.waits_at")
        try:
            worker.wait_ready()
            sweep.start(LEASES | {"WAITS_AT": ""})
            sweep.wait_arrived()
            away(postgres, 3.0, [sweep])
            (ended,) = wait_ended(sweep)
            assert_truth(ended, "final timeout")
            assert "trying again" in worker.output
        finally:
            worker.kill()

    def test_twin_without_the_retry_a_final_timeout_is_lost(self, postgres, held):
        """The drain dies on a bare read before the circuit opens: B is called."""
        short = {"LEASE_MS": "1500", "LEASE_RENEW_MS": "300"}
        sweep = held("final timeout", WITHOUT_RETRY="was_removed", **short).start()
        sweep.wait_arrived()
        away(postgres, 3.0, [sweep])
        wait_ended(sweep)
        assert calls_with(sweep.server, "beta")


class TestG14KilledConnections:
    @pytest.mark.parametrize("number", range(3))
    def test_in_mid_sweep_change_neither_the_end_nor_its_status(self, postgres, held, number):
        """At the first call, while it is out, and once more at each call after it."""
        sweep = held(CALL_OUT).start()
        sweep.wait_arrived()
        assert postgres.terminate_connections()
        sweep.gate.release()
        for calls in (2, 3, 4):
            sweep.server.wait_for_calls(calls)
            postgres.terminate_connections()
        (ended,) = wait_ended(sweep)
        assert_truth(ended, CALL_OUT)
