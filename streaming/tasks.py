"""Celery's doors to chat. A message that comes twice does nothing the second time.

Turns have a queue of their own, `chat`. Beat's work is housekeeping: a pool that is full of turns must not delay it.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from celery import shared_task, signals
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now

from embeddings.runtime import bulkheads, shutdown
from project.runtime.database_threads import in_fifo_thread
from streaming.models import ChatTurn, Conversation
from streaming.states import TURN_ENDED, TurnState
from streaming.turns import claims, fairness, orphaned_turns, transitions, turn_run

logger = logging.getLogger(__name__)

_WAKE_UP_REQUEST = "streaming.turns.wake_ups:WakeUpRequest"
_PURGED_AT_ONCE = 500


@shared_task(name=transitions.RUN_TURN, Request=_WAKE_UP_REQUEST)
def run_turn(public_id: str) -> None:
    """Runs a queued turn to its end."""
    # A turn that is not claimed stays queued: another worker gets it at the next wake-up.
    if shutdown.requested.is_set():
        return
    fairness.note_start()
    claimed = in_fifo_thread(_claim, public_id)
    if claimed is not None:
        turn_run.run(*claimed)


def _claim(public_id: str) -> tuple[ChatTurn, transitions.Claim] | None:
    try:
        found = ChatTurn.objects.select_related("provider").get(public_id=public_id, state=TurnState.QUEUED)
    except ChatTurn.DoesNotExist:
        return None
    claim = transitions.claim(found)
    return None if claim is None else (found, claim)


@shared_task(name="streaming.tick")
def tick() -> None:
    """Beat's round."""
    bulkheads.ROUNDS.wake("turns", go_round)


def go_round() -> None:
    """Ends orphaned turns, and wakes a worker again for those that have been queued for long."""
    for found in orphaned_turns.overdue_turns():
        if found.state == TurnState.QUEUED:
            transitions.notify_worker_again(found)
        else:
            orphaned_turns.end_orphaned(found)


@shared_task(name="streaming.purge")
def purge() -> None:
    """Deletes turns past their retention."""
    bulkheads.PURGES.wake("turns", purge_turns)


def purge_turns() -> None:
    """Deletes turns that ended longer ago than RETENTION_DAYS, some at a time, and conversations left without any."""
    before = Now() - timedelta(days=settings.RETENTION_DAYS)
    old = ChatTurn.objects.filter(ended_at__lt=before, state__in=TURN_ENDED).values_list("pk", flat=True)
    while keys := list(old[:_PURGED_AT_ONCE]):
        with transaction.atomic():
            ChatTurn.objects.filter(pk__in=keys).delete()
    Conversation.objects.filter(created_at__lt=before, turns=None).delete()


@signals.worker_shutting_down.connect(dispatch_uid="chat-turns-end-as-interrupted")
def _end_turns(**_: Any) -> None:
    claims.shut_down()
