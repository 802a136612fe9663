"""Following: a sweep needs no worker, and survives one that dies."""

import contextlib
import threading
import time

import pytest
from celery import current_app

from embeddings.dispatch import drain
from embeddings.models import EmbeddingTask, Provider, TenantRun
from embeddings.runs import follow as following
from embeddings.runs import transitions
from embeddings.runs.follow import follow
from embeddings.runtime import valkey, wake_ups
from embeddings.states import RUN_UNFINISHED, OutcomeStatus, RunStatus, TaskState
from project.runtime import embedded
from tests.support.factories import make_provider, make_tenant
from tests.support.provider_server import containing, hang
from tests.support.sweeps import draining, live_texts, outcome_of, texts
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_databases


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(following, "STEP_IN_AFTER_S", 0.05)
    monkeypatch.setattr(following, "_ADVANCE_EVERY_S", 0.05)


@pytest.fixture
def broker_of_its_own(tmp_path, settings, monkeypatch):
    """A Valkey that no worker of another test listens at; its address in kombu's form."""
    settings.VAR_DIR, settings.REDIS_URL = tmp_path, embedded.redis_url(tmp_path, {})
    monkeypatch.setattr(valkey, "_clients", {})
    with embedded.ensure_valkey(tmp_path):
        yield embedded.broker_url(tmp_path, {})


def hands():
    return [thread for thread in threading.enumerate() if thread.name.startswith("sluicegate-follow")]


def test_it_does_everything_itself_where_no_worker_does(stage):
    a, b = stage.repository("a", *texts("alpha", 9)), stage.repository("b", *texts("beta", 5))
    seen = []
    (run,) = follow([stage.start(a, b)], lambda runs: seen.append(runs[0].status), poll_s=0.02)
    assert run.status == RunStatus.COMPLETED
    assert seen[-1] == RunStatus.COMPLETED
    assert (live_texts(a), live_texts(b)) == (texts("alpha", 9), texts("beta", 5))
    assert (stage.server.peak_in_flight, hands()) == (1, [])


def test_where_nobody_listens_it_steps_in_at_once(stage, monkeypatch, broker_of_its_own):
    monkeypatch.setattr(following, "STEP_IN_AFTER_S", 60.0)
    assert wake_ups.no_worker_listens()
    (run,) = follow([stage.start(stage.repository("a", "alpha"))])
    assert run.status == RunStatus.COMPLETED


def test_where_a_worker_may_listen_it_waits_first(stage, monkeypatch, broker_of_its_own):
    monkeypatch.setattr(following, "STEP_IN_AFTER_S", 0.3)
    with current_app.connection_for_read(url=broker_of_its_own) as connection:
        mailbox = current_app.control.mailbox.Node("w", channel=connection.channel()).listen(callback=print)
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.05)
        assert not wake_ups.no_worker_listens()
        began = time.monotonic()
        follow([stage.start(stage.repository("a", "alpha"))])
        assert time.monotonic() - began >= 0.3
        mailbox.cancel()
    assert eventually(wake_ups.no_worker_listens)


def test_it_follows_runs_of_several_providers(stage):
    other = make_provider(base_url=f"{stage.server.address}/other/v1", batch_size=4)
    a = stage.repository("a", "alpha")
    b = stage.repository("b", "beta", tenant=make_tenant(embedding_provider=other))
    runs = follow([stage.start(a), stage.start(b)], poll_s=0.02)
    assert {run.status for run in runs} == {RunStatus.COMPLETED}


def test_it_takes_over_what_a_dead_worker_left(stage):
    a = stage.repository("a", *texts("alpha", 6))
    run = stage.start(a)
    assert transitions.claim_scan(run.pk)
    type(outcome_of(run, a)).objects.update(scan_lease_expires_at="2000-01-01T00:00Z")

    def kill_the_holder(runs):
        EmbeddingTask.objects.filter(state=TaskState.QUEUED, losses=0, attempts=0).update(
            state=TaskState.DISPATCHED,
            slot=None,
            dispatch_token="gone",
            lease_expires_at="2000-01-01T00:00Z",
            attempts=1,
        )

    follow([run], kill_the_holder, poll_s=0.02)
    assert outcome_of(run, a).status == OutcomeStatus.SUCCEEDED
    assert set(EmbeddingTask.objects.values_list("losses", flat=True)) <= {0, 1}
    assert set(stage.server.texts_seen.values()) == {1}


def test_it_leaves_the_lane_to_whoever_is_at_work(stage):
    a = stage.repository("a", *texts("alpha", 24))
    run = stage.start(a)
    stage.scan(run)
    with draining(stage):
        follow([run], poll_s=0.02)
    assert stage.server.peak_in_flight == 1
    assert set(stage.server.texts_seen.values()) == {1}


def test_interrupted_it_gives_back_what_it_had_dispatched(stage):
    Provider.objects.update(embedding_timeout_ms=60_000)
    stage.server.when(containing("alpha"), hang())
    run = stage.start(stage.repository("a", "alpha"))

    def interrupt(runs):
        if stage.server.in_flight:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow([run], interrupt, poll_s=0.02)
    task = EmbeddingTask.objects.get()
    assert (task.state, task.attempts, task.slot) == (TaskState.QUEUED, 0, None)
    assert TenantRun.objects.get(pk=run.pk).status in RUN_UNFINISHED
    assert hands() == []


def test_what_its_own_hands_raise_is_heard(stage, monkeypatch):
    def broken(*_):
        raise LookupError("broken")

    monkeypatch.setattr(drain, "_admit", broken)
    run = stage.start(stage.repository("a", "alpha"))
    with pytest.raises(LookupError):
        follow([run], poll_s=0.02)
