"""Turns in the admin: listed, filtered, read, cancelled; never edited."""

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from django.utils import timezone

from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TurnOrigin, TurnState
from streaming.turns import transitions
from streaming.turns.model_list import default_model
from streaming.turns.transitions import Ending, NewTurn, Result
from tests.support.factories import make_provider, make_tenant

ANSWER = [{"index": 0, "message": {"role": "assistant", "content": "half of it"}, "finish_reason": None}]


@pytest.fixture
def page(db, client):
    client.force_login(User.objects.create_superuser("operator"))
    return client


@pytest.fixture
def tenant(db):
    return make_tenant(chat_provider=make_provider())


def make_turn(tenant):
    request = {"messages": [{"role": "user", "content": "?"}]}
    return transitions.take(NewTurn(tenant, default_model(tenant, uses_knowledge=False), request, TurnOrigin.NATIVE))


def ended(tenant, state, **values):
    row = make_turn(tenant)
    attempt = ChatAttempt(number=1, started_at=timezone.now(), end_state=state, **values)
    transitions.end(
        transitions.claim(row), Ending(state, "ETIMEDOUT", "silent"), Result(ANSWER, {"total_tokens": 42}, [attempt])
    )
    return row


LIST = reverse("admin:streaming_chatturn_changelist")


def test_the_list_and_the_filter_for_what_was_not_completed(page, tenant):
    well, badly = ended(tenant, TurnState.COMPLETED), ended(tenant, TurnState.IDLE_TIMEOUT)
    everything = page.get(LIST).content.decode()
    assert str(well)[:8] in everything
    assert str(badly)[:8] in everything
    assert "42" in everything
    filtered = page.get(LIST, {"well": "no"}).content.decode()
    assert str(badly)[:8] in filtered
    assert str(well)[:8] not in filtered


def test_the_page_says_why_an_attempt_ended_and_keeps_the_text(page, tenant):
    row = ended(tenant, TurnState.IDLE_TIMEOUT, error_kind="keepalive", first_content_ms=321)
    shown = page.get(reverse("admin:streaming_chatturn_change", args=[row.pk])).content.decode()
    for word in ("keepalive", "321", "half of it", "ETIMEDOUT"):
        assert word in shown


def test_cancel(page, tenant):
    queued = make_turn(tenant)
    running = make_turn(tenant)
    transitions.claim(running)
    page.post(LIST, {"action": "cancel", "_selected_action": [queued.pk, running.pk]})
    queued.refresh_from_db()
    running.refresh_from_db()
    assert queued.state == TurnState.CANCELLED
    assert running.cancel_requested_at is not None


def test_nothing_can_be_edited(page, tenant):
    row = make_turn(tenant)
    assert page.get(reverse("admin:streaming_chatturn_add")).status_code == 403
    page.post(reverse("admin:streaming_chatturn_change", args=[row.pk]), {"model": "other"})
    assert ChatTurn.objects.get().model == "chat"
    assert page.post(reverse("admin:streaming_chatturn_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
