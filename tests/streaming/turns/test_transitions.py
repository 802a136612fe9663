"""A turn's transitions, each compare-and-set: claimed once, ended once, fenced by its token."""

import threading
from datetime import timedelta

import pytest
from django.db import connections
from django.utils import timezone

from streaming.http import turn_requests
from streaming.models import ChatAttempt, ChatTurn
from streaming.refusals import TooManyTurns, UnknownConversation, UnknownModel
from streaming.states import TURN_ENDED, TurnOrigin, TurnStage, TurnState
from streaming.tasks import purge_turns
from streaming.turns import claims, orphaned_turns, transitions
from streaming.turns.conversations import resolve
from streaming.turns.model_list import chat_models, choose, default_model
from streaming.turns.transitions import Claim, Ending, NewTurn, Result
from tests.support.factories import make_provider, make_tenant

DONE = Ending(TurnState.COMPLETED)
ANSWER = Result([{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}])
LOST = Ending(TurnState.INTERRUPTED, "WORKER_LOST")


@pytest.fixture
def tenant(db):
    provider = make_provider()
    return make_tenant(chat_provider=provider, embedding_provider=provider)


def new_turn(tenant):
    request = {"messages": [{"role": "user", "content": "?"}]}
    return NewTurn(tenant, default_model(tenant, uses_knowledge=False), request, TurnOrigin.NATIVE)


@pytest.fixture
def queued(tenant):
    return transitions.take(new_turn(tenant))


def state_of(row):
    return ChatTurn.objects.get(pk=row.pk).state


def let_the_lease_run_out(row):
    ChatTurn.objects.filter(pk=row.pk).update(lease_expires_at=timezone.now() - timedelta(seconds=1))
    row.refresh_from_db()


def test_a_turn_is_claimed_once(queued):
    assert transitions.claim(queued) is not None
    assert transitions.claim(queued) is None
    row = ChatTurn.objects.get()
    assert (row.state, bool(row.claim_token), bool(row.started_at)) == (TurnState.RUNNING, True, True)


def test_a_turn_ends_once_with_what_it_brought(queued):
    claim = transitions.claim(queued)
    attempt = ChatAttempt(number=1, started_at=timezone.now(), end_state="completed")
    assert transitions.end(claim, DONE, Result(ANSWER.choices, {"total_tokens": 3}, [attempt]))
    assert not transitions.end(claim, LOST, Result())
    row = ChatTurn.objects.get()
    assert (row.state, row.answer, row.usage) == (TurnState.COMPLETED, "yes", {"total_tokens": 3})
    assert (row.claim_token, row.lease_expires_at, row.attempts.count()) == ("", None, 1)


def test_whoever_has_lost_the_claim_changes_nothing(queued):
    first = transitions.claim(queued)
    let_the_lease_run_out(queued)
    second = transitions.take_over_orphaned(queued)
    assert not transitions.enter(first, TurnStage.STREAMING, sources=[1])
    assert not transitions.end(first, DONE, ANSWER)
    assert transitions.renew([first]) == 0
    assert transitions.end(second, LOST, Result())
    row = ChatTurn.objects.get()
    assert (row.state, row.answer, row.sources) == (TurnState.INTERRUPTED, "", [])


def test_its_twin_without_the_token_it_would(queued, monkeypatch):
    first = transitions.claim(queued)
    let_the_lease_run_out(queued)
    transitions.take_over_orphaned(queued)
    monkeypatch.setattr(transitions, "_claimed", lambda held: ChatTurn.objects.filter(pk=held.turn_id))
    assert transitions.end(first, DONE, ANSWER)
    assert state_of(queued) == TurnState.COMPLETED


def test_a_claim_that_is_renewed_is_not_taken_over(queued):
    claim = transitions.claim(queued)
    let_the_lease_run_out(queued)
    assert transitions.renew([claim]) == 1
    assert transitions.take_over_orphaned(queued) is None


def test_cancelling(queued, tenant):
    assert transitions.request_cancel(queued)
    assert state_of(queued) == TurnState.CANCELLED
    assert not transitions.request_cancel(queued)
    assert transitions.claim(queued) is None
    running = transitions.take(new_turn(tenant))
    claim = transitions.claim(running)
    assert transitions.request_cancel(running)
    asked_at = ChatTurn.objects.get(pk=running.pk).cancel_requested_at
    assert transitions.request_cancel(running)
    assert ChatTurn.objects.get(pk=running.pk).cancel_requested_at == asked_at
    assert transitions.end(claim, DONE, ANSWER)
    assert not transitions.request_cancel(running)


def test_the_keeper_sees_a_cancel_and_a_loss(queued, tenant):
    other = transitions.take(new_turn(tenant))
    with claims.held(transitions.claim(queued)) as mine, claims.held(transitions.claim(other)) as lost:
        transitions.request_cancel(queued)
        let_the_lease_run_out(other)
        transitions.take_over_orphaned(other)
        claims.renew_all()
        claims.check_all()
        assert (mine.is_cancelled, mine.is_lost) == (True, False)
        assert (lost.is_cancelled, lost.is_lost) == (False, True)


def test_waking_again_is_done_once_in_a_while(queued):
    assert transitions.notify_worker_again(queued)
    assert not transitions.notify_worker_again(queued)
    ChatTurn.objects.update(rung_at=timezone.now() - timedelta(seconds=11))
    assert transitions.notify_worker_again(queued)
    transitions.claim(queued)
    ChatTurn.objects.update(rung_at=None)
    assert not transitions.notify_worker_again(queued)


def test_turns_beyond_the_bound_are_refused(tenant, settings):
    settings.CHAT_TURNS_PER_TENANT = 2
    first, _ = transitions.take(new_turn(tenant)), transitions.take(new_turn(tenant))
    with pytest.raises(TooManyTurns):
        transitions.take(new_turn(tenant))
    transitions.request_cancel(first)
    transitions.take(new_turn(tenant))


def test_a_turn_whose_worker_is_gone_makes_room(tenant, settings):
    settings.CHAT_TURNS_PER_TENANT = 1
    lost = transitions.take(new_turn(tenant))
    transitions.claim(lost)
    let_the_lease_run_out(lost)
    row, claim = turn_requests.take_claimed(new_turn(tenant))
    assert state_of(lost) == TurnState.INTERRUPTED
    assert isinstance(claim, Claim)
    assert row.state == TurnState.RUNNING


@pytest.mark.django_db(transaction=True)
def test_the_bound_holds_for_requests_that_race(settings):
    settings.CHAT_TURNS_PER_TENANT = 3
    provider = make_provider()
    tenant = make_tenant(chat_provider=provider, embedding_provider=None)
    start, outcomes = threading.Barrier(8), []

    def take():
        start.wait()
        try:
            outcomes.append(transitions.take_claimed(new_turn(tenant)))
        except TooManyTurns as refused:
            outcomes.append(refused)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(not isinstance(outcome, TooManyTurns) for outcome in outcomes) == 3
    assert len(outcomes) == 8
    assert ChatTurn.objects.count() == 3


def test_a_queued_turn_is_not_given_up_while_a_worker_is_there(queued, monkeypatch):
    ChatTurn.objects.update(created_at=timezone.now() - timedelta(seconds=60))
    queued.refresh_from_db()
    monkeypatch.setattr(orphaned_turns, "_answers", [(float("inf"), True)])
    assert not orphaned_turns.end_unclaimed(queued)
    assert ChatTurn.objects.get().rung_at is not None
    monkeypatch.setattr(orphaned_turns, "_answers", [(float("inf"), False)])
    assert orphaned_turns.end_unclaimed(queued)
    assert ChatTurn.objects.get().error_code == "NO_WORKER"


def test_a_broker_that_is_away_is_given_half_a_minute(queued, monkeypatch):
    monkeypatch.setattr(orphaned_turns, "_answers", [(float("inf"), None)])
    ChatTurn.objects.update(created_at=timezone.now() - timedelta(seconds=20))
    queued.refresh_from_db()
    assert not orphaned_turns.end_unclaimed(queued)
    ChatTurn.objects.update(created_at=timezone.now() - timedelta(seconds=31))
    queued.refresh_from_db()
    assert orphaned_turns.end_unclaimed(queued)


def test_old_turns_are_purged_and_young_or_unfinished_ones_kept(tenant, settings):
    long_ago = timezone.now() - timedelta(days=settings.RETENTION_DAYS + 1)
    old, young, unfinished = (transitions.take(new_turn(tenant)) for _ in range(3))
    for row, ended_at in ((old, long_ago), (young, timezone.now())):
        claim = transitions.claim(row)
        attempt = ChatAttempt(number=1, started_at=timezone.now())
        assert transitions.end(claim, DONE, Result(attempts=[attempt]))
        ChatTurn.objects.filter(pk=row.pk).update(ended_at=ended_at)
    purge_turns()
    assert set(ChatTurn.objects.values_list("pk", flat=True)) == {young.pk, unfinished.pk}


def test_the_end_states_are_those_of_the_stream(db):
    from streaming.upstream.errors import EndState

    assert {str(state) for state in TURN_ENDED} == {state.value for state in EndState}


def test_what_a_tenant_may_chat_with(tenant):
    assert [model.name for model in chat_models(tenant)] == ["chat", "chat+knowledge"]
    assert choose(tenant, "chat+knowledge").uses_knowledge
    assert default_model(tenant, uses_knowledge=True).name == "chat+knowledge"
    without_rows = make_tenant(chat_provider=make_provider(), embedding_provider=None)
    assert [model.name for model in chat_models(without_rows)] == ["chat"]
    assert default_model(without_rows, uses_knowledge=True).name == "chat"
    with pytest.raises(UnknownModel):
        default_model(make_tenant(), uses_knowledge=False)


def test_a_conversation_of_another_tenant(tenant):
    mine = resolve(tenant, "new", [{"role": "user", "content": "Title?"}])
    assert mine.title == "Title?"
    assert resolve(tenant, str(mine.public_id), []) == mine
    with pytest.raises(UnknownConversation):
        resolve(make_tenant(), str(mine.public_id), [])
