"""The timeout contract of both local kinds, each guarantee beside a twin that breaks the mechanism and sees the bad thing
(docs/architecture.md, Guarantees): the lane of OpenAI-compatible servers and native Ollama's admission.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from django.db import DatabaseError

from embeddings import codes
from embeddings.dispatch import admission, reply_storage, task_queue
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, KnowledgeRow, RepositoryOutcome, TenantRun
from embeddings.query import interactive
from embeddings.runs import circuit, sweep, transitions
from embeddings.states import TaskState
from embeddings.timeouts import OPENAI_COMPATIBLE_REQUEST_TIMEOUT, PROVIDER_TIMEOUT
from project.runtime import event_loop
from tests.support.provider_server import Gate, ProviderServer, Reply, containing, default, gated, hang, reset, status
from tests.support.sweeps import (
    DIMENSIONS,
    LOCAL_KINDS,
    OLLAMA,
    OPENAI,
    Site,
    all_codes,
    calls_with,
    make_site,
    outcome_of,
    slots_taken,
    stored,
    tasks_in,
    texts,
)
from tests.support.threads import in_threads, raised_by
from tests.support.waiting import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.both_databases]

CODE = {OPENAI: OPENAI_COMPATIBLE_REQUEST_TIMEOUT, OLLAMA: PROVIDER_TIMEOUT}
SPARED = ("deferred", codes.CIRCUIT_OPEN, "")
HASTY = {"embedding_timeout_ms": 1_000, "query_timeout_ms": 1_000}


@pytest.fixture
def server():
    with ProviderServer(dimensions=DIMENSIONS) as running:
        yield running


@pytest.fixture
def hasty_ollama(server, tmp_path) -> Site:
    """It is given one second: the least."""
    return make_site(OLLAMA, server, tmp_path, batch_size=4, **HASTY)


@pytest.fixture(params=LOCAL_KINDS)
def hasty(request, server, tmp_path) -> Site:
    """A site of each local kind, one call at a time, one second each."""
    return make_site(request.param, server, tmp_path, batch_size=4, **HASTY)


@pytest.fixture(params=LOCAL_KINDS)
def local(request, server, tmp_path) -> Site:
    """A site of each local kind, one call at a time, with patience."""
    return make_site(request.param, server, tmp_path, batch_size=4)


def timed_out(site: Site) -> tuple[str, str, str]:
    return ("deferred", codes.PROVIDER_TIMED_OUT, CODE[site.provider.kind])


@pytest.fixture
def queued_pair(hasty: Site):
    """A and B of one run, both queued at one slot, A first; the server is silent for A."""
    first, other = hasty.repository("a", *texts("alpha", 3)), hasty.repository("b", *texts("beta", 3))
    hasty.server.when(containing("alpha"), hang())
    run = hasty.start_and_scan(first, other)
    assert tasks_in(TaskState.QUEUED, run) == 2
    return hasty, run, first, other


class TestOneContractServesBothLocalKinds:
    def test_g1_g3_a_keeps_its_timeout_and_b_makes_no_call(self, queued_pair) -> None:
        site, run, first, other = queued_pair
        run = site.carry_out(run)
        assert all_codes(run, first, other) == [timed_out(site), SPARED]
        assert (len(calls_with(site.server, "alpha")), len(calls_with(site.server, "beta"))) == (1, 0)
        assert outcome_of(run, other).provider_calls == 0
        assert (run.circuit.state, run.circuit.source_error_code) == ("open", CODE[site.provider.kind])
        assert run.circuit.opened_by == str(first)

    def test_g1_twin_a_finish_without_the_notification_dispatches_b(self, queued_pair, monkeypatch) -> None:
        site, run, _, _ = queued_pair
        silent = replace(admission.POLICIES[site.provider.kind], notifies=False)
        monkeypatch.setitem(admission.POLICIES, site.provider.kind, silent)
        site.carry_out(run)
        assert len(calls_with(site.server, "beta")) == 1

    def test_g1_both_kinds_notify_by_the_very_same_function(self) -> None:
        policies = [admission.POLICIES[kind] for kind in LOCAL_KINDS]
        assert [policy.notifies for policy in policies] == [True, True]
        assert {type(policy).finish for policy in policies} == {admission.AdmissionPolicy.finish}

    def test_g2_twin_a_notification_after_the_slot_is_free_dispatches_b(self, queued_pair, monkeypatch) -> None:
        site, run, _, _ = queued_pair
        notify = admission.notify_provider_timeout

        def late(error, callback):
            (task,) = EmbeddingTask.objects.filter(state=TaskState.DISPATCHED)
            EmbeddingTask.objects.filter(pk=task.pk).update(slot=None)
            with in_threads() as submit:
                submit(site.drain)
            EmbeddingTask.objects.filter(pk=task.pk).update(slot=0)
            return notify(error, callback)

        monkeypatch.setattr(admission, "notify_provider_timeout", late)
        site.carry_out(run)
        assert len(calls_with(site.server, "beta")) == 1

    def test_g6_a_callback_that_opens_and_raises_changes_nothing(self, queued_pair) -> None:
        site, run, first, other = queued_pair
        third = site.repository("c", *texts("gamma", 2))
        third_run = site.start_and_scan(third)

        def raising(task):
            def callback(error):
                circuit.open_for(task, error)
                raise RuntimeError("after opening")

            return callback

        controls = replace(sweep.CONTROLS, on_provider_timeout_for=raising)
        sweep.drain(site.provider.pk, controls)
        run = site.carry_out(run)
        assert all_codes(run, first, other) == [timed_out(site), SPARED]
        assert len(calls_with(site.server, "beta")) == 0
        assert (site.carry_out(third_run).status, slots_taken()) == ("completed", 0)

    def test_g8_the_next_sweep_has_a_closed_circuit_and_resumes(self, queued_pair) -> None:
        site, run, first, other = queued_pair
        site.carry_out(run)
        site.server.clear_script()
        again = site.swept(first, other)
        assert (again.status, again.circuit.state) == ("completed", "closed")
        assert (stored(first), stored(other)) == (3, 3)


class TestG4OnlyTheFinalFailureCounts:
    def test_a_load_that_ends_well_opens_nothing(self, local: Site) -> None:
        local.server.next(status(404), status(404))
        repository = local.repository("a", *texts("alpha", 3))
        run = local.swept(repository)
        assert (run.status, run.circuit.state, outcome_of(run, repository).provider_calls) == ("completed", "closed", 3)

    def test_a_timeout_after_loading_is_final_and_counts_every_call(self, hasty: Site) -> None:
        hasty.server.next(status(404), hang())
        repository = hasty.repository("a", *texts("alpha", 3))
        run = hasty.swept(repository)
        assert all_codes(run, repository) == [timed_out(hasty)]
        assert (run.circuit.state, outcome_of(run, repository).provider_calls) == ("open", 2)

    def test_an_interactive_text_that_timed_out_once_is_tried_again(self, hasty_ollama: Site) -> None:
        hasty_ollama.server.next(hang(), default())
        run = hasty_ollama.start_and_scan(hasty_ollama.repository("a", *texts("alpha", 3)))
        found = interactive.embed_texts(hasty_ollama.provider, ["query"], timeout_ms=20_000)
        assert found.shape == (1, DIMENSIONS)
        assert hasty_ollama.carry_out(run).circuit.state == "closed"


class TestG5WhatOpensNothing:
    @pytest.mark.parametrize("reply", [status(n) for n in (400, 401, 404, 408, 500, 502, 504)] + [reset()], ids=repr)
    def test_any_other_failure_of_the_provider(self, reply, local: Site) -> None:
        local.server.when(containing("alpha"), reply)
        first, other = local.repository("a", *texts("alpha", 3)), local.repository("b", *texts("beta", 3))
        run = local.swept(first, other)
        assert run.circuit.state == "closed"
        assert outcome_of(run, first).status == "failed"
        assert outcome_of(run, other).status == "succeeded"

    @pytest.mark.parametrize("code", [429, 503])
    def test_a_busy_provider(self, code: int, local: Site, settings) -> None:
        settings.BUSY_RETRY_AFTER_MAX_MS, settings.BUSY_REQUEUES_MAX = 1, 2
        local.server.when(containing("alpha"), status(code))
        first, other = local.repository("a", *texts("alpha", 3)), local.repository("b", *texts("beta", 3))
        run = local.swept(first, other)
        assert all_codes(run, first, other) == [
            ("deferred", codes.PROVIDER_BUSY, codes.PROVIDER_BUSY),
            ("succeeded", "", ""),
        ]
        assert run.circuit.state == "closed"

    def test_a_cancelled_caller_whose_call_then_times_out(self, hasty: Site) -> None:
        hasty.server.when(containing("alpha"), hang())
        first, other = hasty.repository("a", *texts("alpha", 3)), hasty.repository("b", *texts("beta", 3))
        run = hasty.start_and_scan(first, other)
        with in_threads() as submit:
            submit(hasty.drain)
            hasty.server.wait_for_calls(1)
            sweep.cancel_outcome(outcome_of(run, first))
        run = hasty.carry_out(run)
        assert run.circuit.state == "closed"
        assert (outcome_of(run, first).status, outcome_of(run, other).status) == ("cancelled", "succeeded")

    def test_a_search_that_times_out_opens_no_runs_circuit(self, hasty_ollama: Site) -> None:
        hasty_ollama.server.when(containing("query"), hang())
        run = hasty_ollama.start_and_scan(hasty_ollama.repository("a", *texts("alpha", 3)))
        assert raised_by(lambda: interactive.embed_texts(hasty_ollama.provider, ["query"])) is not None
        run = hasty_ollama.carry_out(run)
        assert (run.status, run.circuit.state) == ("completed", "closed")

    def test_our_own_loop_that_stood_still(self, hasty_ollama: Site) -> None:

        hasty_ollama.server.when(containing("alpha"), hang())
        first, other = hasty_ollama.repository("a", *texts("alpha", 3)), hasty_ollama.repository("b", *texts("beta", 3))
        run = hasty_ollama.start_and_scan(first, other)
        with in_threads() as submit:
            submit(hasty_ollama.drain)
            hasty_ollama.server.wait_for_calls(1)
            # A loop that stands still, as under a debugger or on a machine that swaps.
            event_loop.loop().call_soon_threadsafe(threading.Event().wait, 2.4)
        run = hasty_ollama.carry_out(run)
        assert outcome_of(run, first).source_error_code == "OWN_TIMEOUT"
        assert (run.circuit.state, outcome_of(run, other).status) == ("closed", "succeeded")

    def test_a_timeout_shaped_error_of_the_database(self, local: Site, monkeypatch) -> None:
        class Refused(DatabaseError):
            code = "ETIMEDOUT"

        real = store.write_vectors

        def refuse_alpha(repository_id, rows):
            if RepositoryOutcome.objects.filter(repository=repository_id, repository_slug="a").exists():
                raise Refused("statement timeout")
            return real(repository_id, rows)

        monkeypatch.setattr(store, "write_vectors", refuse_alpha)
        first, other = local.repository("a", *texts("alpha", 3)), local.repository("b", *texts("beta", 3))
        run = local.swept(first, other)
        assert all_codes(run, first) == [("failed", codes.STORE_FAILED, codes.STORE_FAILED)]
        assert (run.circuit.state, outcome_of(run, other).status) == ("closed", "succeeded")

    def test_twin_a_predicate_that_takes_any_error_opens_it(self, local: Site, monkeypatch) -> None:
        monkeypatch.setattr("embeddings.timeouts.is_provider_timeout", lambda error: True)
        local.server.next(status(502))
        run = local.swept(local.repository("a", *texts("alpha", 3)))
        assert run.circuit.state == "open"


class TestCapTwo:
    """One repository already in flight when the other times out, a third queued behind them."""

    @pytest.fixture
    def two(self, hasty_ollama: Site):
        hasty_ollama.configure(max_in_flight=2)
        gate = Gate()
        hasty_ollama.server.when(containing("alpha"), hang())
        first = hasty_ollama.repository("a", *texts("alpha", 3))
        other = hasty_ollama.repository("b", *texts("beta", 6))
        third = hasty_ollama.repository("c", *texts("gamma", 3))
        run = hasty_ollama.start_and_scan(first, other, third, concurrency=3)
        with in_threads() as submit:
            submit(hasty_ollama.drain)
            hasty_ollama.server.wait_for_calls(1)
            # The second call has the patience that the first one lacks.
            hasty_ollama.configure(embedding_timeout_ms=60_000)
            yield SimpleNamespace(
                site=hasty_ollama,
                run=run,
                first=first,
                other=other,
                third=third,
                gate=gate,
                drain_too=lambda: submit(hasty_ollama.drain),
            )
            gate.release()

    def play(self, two: SimpleNamespace, reply: Reply | None = None) -> TenantRun:
        """A times out while B's call is out; then `reply` to B. The run, ended."""
        two.site.server.when(containing("beta"), gated(two.gate, reply), times=1)
        two.drain_too()
        two.gate.wait_arrived()
        eventually(lambda: outcome_of(two.run, two.first).status == "deferred")
        assert two.site.server.in_flight == 1
        two.gate.release()
        return two.site.carry_out(two.run)

    def test_the_call_in_flight_keeps_what_it_earned(self, two) -> None:
        run = self.play(two)
        assert all_codes(run, two.first, two.other, two.third) == [timed_out(two.site), SPARED, SPARED]
        assert (stored(two.first), stored(two.other), stored(two.third)) == (0, 4, 0)
        facts = outcome_of(run, two.other)
        assert (facts.embedded, facts.pending, facts.provider_calls) == (4, 2, 1)
        assert [call.ended_by for call in two.site.server.embedding_calls] == ["client_closed", "replied"]
        assert slots_taken() == 0

    def test_the_next_sweep_takes_the_rest(self, two) -> None:
        self.play(two)
        again = two.site.swept(two.other)
        assert outcome_of(again, two.other).provider_calls == 1
        assert stored(two.other) == 6

    def test_with_nothing_left_to_do_it_succeeds(self, two) -> None:
        EmbeddingTask.objects.filter(outcome__repository=two.other, text_count=2).delete()
        KnowledgeRow.objects.filter(repository=two.other, task=None).delete()
        assert all_codes(self.play(two), two.other) == [("succeeded", "", "")]

    def test_a_late_busy_reply_is_not_requeued(self, two) -> None:
        run = self.play(two, status(429, headers={"Retry-After": "1"}))
        assert all_codes(run, two.first, two.other, two.third) == [timed_out(two.site), SPARED, SPARED]
        assert (tasks_in(TaskState.QUEUED), len(two.site.server.embedding_calls)) == (0, 2)

    def test_a_late_refusal_is_not_split(self, two) -> None:
        run = self.play(two, status(400))
        assert all_codes(run, two.other) == [SPARED]
        assert (tasks_in(TaskState.QUEUED), len(two.site.server.embedding_calls)) == (0, 2)

    def test_a_late_failure_of_its_own_is_its_own(self, two) -> None:
        run = self.play(two, status(502))
        assert all_codes(run, two.other) == [("failed", codes.PROVIDER_FAILED, "PROVIDER_STATUS")]

    def test_a_late_timeout_of_its_own_is_its_own_and_the_circuit_keeps_its_opener(self, two) -> None:
        two.site.configure(embedding_timeout_ms=2_000)
        two.site.server.when(containing("beta"), hang())
        two.drain_too()
        run = two.site.carry_out(two.run)
        assert all_codes(run, two.first, two.other, two.third) == [timed_out(two.site)] * 2 + [SPARED]
        assert run.circuit.opened_by == str(two.first)

    def test_twin_an_opening_that_cancels_what_is_out_loses_it(self, two, monkeypatch) -> None:
        real = transitions.stop_dispatch

        def cancelling(run_id, status_, code):
            task_queue.cancel_dispatched(code, run=run_id)
            real(run_id, status_, code)

        monkeypatch.setattr(transitions, "stop_dispatch", cancelling)
        monkeypatch.setattr(reply_storage, "store_late", lambda answered: None)
        self.play(two)
        assert stored(two.other) == 0

    def test_twin_a_requeue_that_ignores_the_run_comes_back(self, two, monkeypatch) -> None:
        monkeypatch.setattr(task_queue, "refusal", lambda run_id, outcome_id: "")
        two.site.server.when(containing("beta"), gated(two.gate, status(429)), times=1)
        two.drain_too()
        two.gate.wait_arrived()
        eventually(lambda: outcome_of(two.run, two.first).status == "deferred")
        two.gate.release()
        eventually(lambda: EmbeddingTask.objects.filter(busy_requeues=1, call_ended_by="busy").exists())
