"""Native Ollama's admission: its cap, its waiters, and the slot that belongs to the HTTP call; the guarantees of it, each
beside a twin that breaks the mechanism and sees the bad thing (docs/architecture.md, Guarantees).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DatabaseError, connection

from embeddings.dispatch import reply_storage, task_queue
from embeddings.dispatch.admission import POLICIES
from embeddings.errors import ProviderConfigurationError, TaskRemoved, UsageError
from embeddings.models import EmbeddingTask, Provider, TenantRun
from embeddings.query import interactive
from embeddings.registry import set_provider
from embeddings.runs import sweep
from embeddings.runs.follow import follow
from embeddings.runtime import shutdown
from embeddings.states import RUN_UNFINISHED, ProviderKind, TaskState
from tests.support.commanding import manage
from tests.support.factories import make_generation, make_outcome, make_repository, make_run, make_task
from tests.support.provider_server import (
    Gate,
    ProviderServer,
    containing,
    delay,
    gated,
    hang,
    reset,
    status,
    vectors,
    with_number,
)
from tests.support.sweeps import (
    DIMENSIONS,
    OLLAMA,
    Site,
    calls_with,
    make_site,
    outcome_of,
    slots_taken,
    stored,
    tasks_in,
    texts,
)
from tests.support.threads import in_threads, raised_by
from tests.support.waiting import PROMPTLY_S, eventually

NATIVE = POLICIES[ProviderKind.OLLAMA]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.both_databases]

LONG = {"embedding_timeout_ms": 60_000, "query_timeout_ms": 60_000}


@pytest.fixture
def server():
    with ProviderServer(dimensions=DIMENSIONS) as running:
        yield running


@pytest.fixture
def ollama(server, tmp_path) -> Site:
    return make_site(OLLAMA, server, tmp_path, batch_size=4, **LONG)


# --- the cap ----------------------------------------------------------------------------------------------------------
NO_CAPS = [0, -1, 1.5, math.nan, math.inf, "2", "many", None, True, [1]]


class TestTheCapIsAPositiveWholeNumber:
    @pytest.mark.parametrize("cap", NO_CAPS, ids=repr)
    def test_admission_refuses_anything_else_by_name(self, cap: object) -> None:
        with pytest.raises(ProviderConfigurationError, match="max_in_flight"):
            NATIVE.cap(cap)

    def test_it_takes_any_positive_one(self) -> None:
        assert [NATIVE.cap(cap) for cap in (1, 2, 64)] == [1, 2, 64]

    @pytest.mark.parametrize("cap", NO_CAPS, ids=repr)
    def test_the_registry_refuses_it_by_name(self, cap: object, ollama: Site) -> None:
        with pytest.raises(UsageError, match="max_in_flight"):
            set_provider(ollama.provider.name, {"max_in_flight": cap})
        ollama.provider.refresh_from_db()
        assert ollama.provider.max_in_flight == 1

    @pytest.mark.parametrize("cap", ["0", "-1", "1.5", "NaN", "many", ""])
    def test_the_command_refuses_it_by_name(self, cap: str, ollama: Site) -> None:
        ended = manage("provider", "set", ollama.provider.name, f"--max-in-flight={cap}")
        assert ended.status == 2
        assert "max-in-flight" in ended.err.replace("_", "-")
        ollama.provider.refresh_from_db()
        assert ollama.provider.max_in_flight == 1

    @pytest.mark.parametrize("cap", [0, -1, 1.5, "many"])
    def test_a_row_edited_by_hand_ends_a_sweep_by_name(self, cap: object, ollama: Site) -> None:
        if connection.vendor == "postgresql" and not isinstance(cap, int):
            cap = 0  # That database takes nothing but whole numbers.
        repository = ollama.repository("a", *texts("alpha", 3))
        run = ollama.start_and_scan(repository)
        edit_by_hand(cap)
        outcome = outcome_of(ollama.carry_out(run), repository)
        assert (outcome.status, outcome.source_error_code) == ("failed", "PROVIDER_CONFIGURATION")
        assert "max_in_flight" in outcome.error_detail
        assert repr(cap) in outcome.error_detail
        assert ollama.server.embedding_calls == []
        edit_by_hand(1)
        assert outcome_of(ollama.swept(repository), repository).status == "succeeded"

    def test_a_row_edited_by_hand_ends_a_search_by_name(self, ollama: Site) -> None:
        edit_by_hand(0)
        with pytest.raises(Exception, match="max_in_flight") as raised:
            interactive.embed_texts(ollama.provider, ["query"])
        assert raised.value.code == "PROVIDER_CONFIGURATION"

    def test_a_follower_does_not_wait_for_ever(self, ollama: Site) -> None:
        repository = ollama.repository("a", *texts("alpha", 3))
        run = ollama.start_and_scan(repository)
        edit_by_hand(-1)
        (ended,) = follow([run], poll_s=0.05)
        assert ended.status == "failed"

    def test_a_reply_counts_although_the_cap_has_become_nonsense(self, ollama: Site) -> None:
        repository = ollama.repository("a", *texts("alpha", 8))
        gate = Gate()
        ollama.server.next(gated(gate))
        run = ollama.start_and_scan(repository)
        with in_threads() as submit:
            submit(ollama.drain)
            gate.wait_arrived()
            edit_by_hand(0)
            gate.release()
        assert ollama.carry_out(run).status == "failed"
        assert stored(repository) == 4


def edit_by_hand(cap: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE embeddings_provider SET max_in_flight = %s", [cap])


class TestTheCapIsReadAnew:
    @pytest.fixture
    def queue(self, ollama: Site):
        run = make_run(ollama.provider)
        for _ in range(4):
            make_task(make_outcome(run, make_repository(ollama.tenant)))
        return ollama

    def test_at_every_admission(self, queue: Site) -> None:
        provider = queue.provider
        first = NATIVE.admit(provider)
        assert first is not None
        assert NATIVE.admit(provider) is None
        Provider.objects.filter(pk=provider.pk).update(max_in_flight=2)
        second = NATIVE.admit(provider)
        assert second is not None
        assert NATIVE.admit(provider) is None
        Provider.objects.filter(pk=provider.pk).update(max_in_flight=1)
        held, following = NATIVE.settle_and_admit(first)
        assert (held, following) == (True, None)
        held, following = NATIVE.settle_and_admit(second)
        assert held
        assert following is not None

    def test_the_database_itself_refuses_two_in_one_slot(self, queue: Site) -> None:
        NATIVE.admit(queue.provider)
        with pytest.raises(DatabaseError):
            EmbeddingTask.objects.filter(state=TaskState.QUEUED).update(slot=0)

    def test_waiters_go_in_the_order_in_which_they_came_interactive_first(self, queue: Site) -> None:
        Provider.objects.filter(pk=queue.provider.pk).update(max_in_flight=5)
        generation = make_generation(queue.provider)
        task_queue.put_interactive(queue.provider, generation, ["query"], timeout_ms=60_000)
        admitted = [NATIVE.admit(queue.provider) for _ in range(5)]
        assert admitted[0].is_interactive
        assert [task.id for task in admitted[1:]] == sorted(task.id for task in admitted[1:])

    def test_a_batch_that_was_overtaken_for_too_long_goes_next(self, queue: Site, settings) -> None:
        settings.LANE_BATCH_MAX_WAIT_MS = 0
        generation = make_generation(queue.provider)
        for _ in range(2):
            task_queue.put_interactive(queue.provider, generation, ["query"], timeout_ms=60_000)
        first = NATIVE.admit(queue.provider)
        _, second = NATIVE.settle_and_admit(first)
        assert (first.is_interactive, second.is_interactive) == (True, False)


class TestSeveralAtOnce:
    @pytest.mark.parametrize("cap", [1, 2, 3])
    def test_no_more_than_the_cap_whoever_drains(self, cap: int, ollama: Site) -> None:
        ollama.configure(max_in_flight=cap)
        ollama.server.script(lambda call: delay(0.02))
        chosen = [ollama.repository(name, *texts(name, 24)) for name in ("alpha", "beta")]
        run = ollama.start_and_scan(*chosen)
        with in_threads() as submit:
            for _ in range(4):
                submit(ollama.drain)
        assert ollama.carry_out(run).status == "completed"
        assert ollama.server.peak_in_flight <= cap
        assert max(ollama.server.texts_seen.values()) == 1

    def test_a_follower_alone_fills_every_slot(self, ollama: Site) -> None:
        ollama.configure(max_in_flight=3)
        gate = Gate()
        ollama.server.script(lambda call: gated(gate))
        run = ollama.start_and_scan(ollama.repository("a", *texts("alpha", 16)))
        with in_threads() as submit:
            submit(lambda: follow([run], poll_s=0.05))
            gate.wait_arrived(3)
            gate.release()
        assert TenantRun.objects.get(pk=run.pk).status == "completed"
        assert ollama.server.peak_in_flight == 3

    def test_workers_ring_one_another_until_every_slot_is_taken(self, ollama: Site, fleet) -> None:
        """One bell is enough: each drain that leaves a slot idle beside a task rings for one more."""
        ollama.configure(max_in_flight=2)
        fleet.start(2)
        gate = Gate()
        ollama.server.script(lambda call: gated(gate))
        run = ollama.start_and_scan(ollama.repository("a", *texts("alpha", 16)))
        gate.wait_arrived(2, timeout=20)
        gate.release()
        eventually(lambda: sweep.advance(run.pk).status not in RUN_UNFINISHED, 20)
        assert ollama.server.peak_in_flight == 2


# --- the slot belongs to the call -------------------------------------------------------------------------------------
class TestTheSlotBelongsToTheCall:
    @pytest.fixture
    def at(self, ollama: Site):
        """A batch at the provider, held at a gate, and a second repository queued behind it."""
        gate = Gate()
        ollama.server.when(containing("alpha"), gated(gate))
        first, other = ollama.repository("a", *texts("alpha", 3)), ollama.repository("b", *texts("beta", 3))
        run = ollama.start_and_scan(first, other)
        with in_threads() as submit:
            submit(ollama.drain)
            gate.wait_arrived()
            yield SimpleNamespace(site=ollama, run=run, first=first, other=other, gate=gate)
            gate.release()

    def test_a_cancelled_batch_is_over_at_once_and_its_slot_is_not(self, at) -> None:
        sweep.cancel_outcome(outcome_of(at.run, at.first))
        assert outcome_of(at.run, at.first).status == "cancelled"
        assert slots_taken() == 1
        at.site.drain()
        assert len(calls_with(at.site.server, "beta")) == 0
        # Long enough for whoever waits for the call to have looked at its task.
        with pytest.raises(AssertionError, match="the call is broken off"):
            eventually(lambda: not at.site.server.embedding_calls[0].is_open, 0.8, message="the call is broken off")
        at.gate.release()
        eventually(lambda: len(calls_with(at.site.server, "beta")) == 1)
        assert at.site.carry_out(at.run).status == "cancelled" or outcome_of(at.run, at.other).status == "succeeded"
        assert at.site.server.peak_in_flight == 1
        assert at.site.server.embedding_calls[0].ended_by == "replied"

    def test_vectors_that_come_after_all_are_stored(self, at) -> None:
        sweep.cancel_outcome(outcome_of(at.run, at.first))
        at.gate.release()
        eventually(lambda: stored(at.first) == 3)
        at.site.carry_out(at.run)
        assert outcome_of(at.run, at.first).status == "cancelled"
        eventually(lambda: outcome_of(at.run, at.first).pending == 0)
        again = at.site.swept(at.first)
        assert outcome_of(again, at.first).provider_calls == 0

    def test_twin_a_gate_that_keeps_no_late_reply_buys_the_batch_twice(self, at, monkeypatch) -> None:
        monkeypatch.setattr(reply_storage, "store_late", lambda answered: None)
        sweep.cancel_outcome(outcome_of(at.run, at.first))
        at.gate.release()
        eventually(lambda: slots_taken() == 0 and len(calls_with(at.site.server, "beta")) == 1)
        at.site.carry_out(at.run)
        assert stored(at.first) == 0

    def test_twin_a_slot_released_with_its_caller_lets_a_second_call_out(self, at, monkeypatch) -> None:
        free_with_the_caller(monkeypatch)
        sweep.cancel_outcome(outcome_of(at.run, at.first))
        at.site.drain()
        assert at.site.server.peak_in_flight == 2

    def test_a_cancelled_search_hears_at_once_and_its_slot_stays(self, ollama: Site) -> None:
        gate = Gate()
        ollama.server.when(containing("query"), gated(gate))
        is_cancelled = []
        with in_threads() as submit:
            asking = submit(
                lambda: raised_by(
                    lambda: interactive.embed_texts(ollama.provider, ["query"], is_cancelled=lambda: bool(is_cancelled))
                )
            )
            gate.wait_arrived()
            is_cancelled.append(True)
            assert asking.result(5) is TaskRemoved
            assert (slots_taken(), ollama.server.in_flight) == (1, 1)
            gate.release()
            eventually(lambda: slots_taken() == 0)
        assert ollama.server.embedding_calls[0].ended_by == "replied"

    def test_a_waiter_that_is_cancelled_leaves_and_the_next_one_moves(self, at) -> None:
        third = at.site.repository("c", *texts("gamma", 3))
        third_run = at.site.start_and_scan(third)
        sweep.cancel_outcome(outcome_of(at.run, at.other))
        assert tasks_in(TaskState.QUEUED, at.run) == 0
        at.gate.release()
        eventually(lambda: len(calls_with(at.site.server, "gamma")) == 1)
        at.site.carry_out(third_run)
        assert len(calls_with(at.site.server, "beta")) == 0
        assert outcome_of(third_run, third).status == "succeeded"

    @pytest.mark.parametrize(
        "reply",
        [status(400), status(429), status(502), reset(), vectors(with_number(None))],
        ids=repr,
    )
    def test_no_failure_after_a_cancel_leaks_the_slot(self, reply, ollama: Site) -> None:
        gate = Gate()
        ollama.server.next(gated(gate, reply))
        first, other = ollama.repository("a", *texts("alpha", 3)), ollama.repository("b", *texts("beta", 3))
        run = ollama.start_and_scan(first, other)
        with in_threads() as submit:
            submit(ollama.drain)
            gate.wait_arrived()
            sweep.cancel_outcome(outcome_of(run, first))
            gate.release()
        # Before its lease ends: by then it would be free in any case.
        eventually(lambda: slots_taken() == 0, PROMPTLY_S, message="the slot is free")
        ollama.carry_out(run)
        assert (outcome_of(run, first).status, outcome_of(run, other).status) == ("cancelled", "succeeded")

    def test_a_worker_that_stops_gives_back_the_slot_of_a_cancelled_task(self, at) -> None:
        """Its call ends with the worker; `at_the_provider` holds the at.gate until the end."""
        sweep.cancel_outcome(outcome_of(at.run, at.first))
        shutdown.requested.set()
        try:
            eventually(lambda: slots_taken() == 0)
        finally:
            shutdown.requested.clear()

    def test_a_killed_workers_slot_comes_back_when_its_lease_ends_and_not_before(self, ollama: Site, fleet) -> None:
        ollama.server.next(hang())
        repository = ollama.repository("a", *texts("alpha", 3))
        (worker,) = fleet.start(1)
        run = ollama.start_and_scan(repository)
        ollama.server.wait_for_calls(1, 20)
        worker.kill()
        task = EmbeddingTask.objects.get(run=run)
        if not is_past(task):
            assert NATIVE.admit(ollama.provider) is None or is_past(task)
        again = eventually(lambda: NATIVE.admit(ollama.provider))
        assert is_past(task)
        assert (again.id, again.token != task.dispatch_token) == (task.pk, True)


def is_past(task: EmbeddingTask) -> bool:
    """Whether the lease, as it was when the worker was killed, has ended by the database's clock."""
    return not EmbeddingTask.objects.filter(pk=task.pk, lease_expires_at=task.lease_expires_at).exists()


def free_with_the_caller(monkeypatch) -> None:
    """Breaks admission: a cancelled task gives its slot up, whatever its call does."""
    real = task_queue.cancel_dispatched

    def cancel(reason: str, **where: Any) -> int:
        EmbeddingTask.objects.filter(state=TaskState.DISPATCHED, **where).update(slot=None)
        return real(reason, **where)

    monkeypatch.setattr(task_queue, "cancel_dispatched", cancel)
