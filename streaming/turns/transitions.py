"""Every transition of a turn, each a compare-and-set on its row (docs/architecture.md, Data and states, ChatTurn).

A turn is stored, claimed by one worker under a lease, and ended once. A holder whose claim is lost changes nothing any more.
The run of a turn, from retrieval to its last attempt, is `streaming.turns.turn_run`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from embeddings.models import Tenant
from embeddings.runtime import wake_ups
from embeddings.runtime.clock import LeaseExpiry
from embeddings.runtime.retry import retry_on_database_error
from streaming import codes
from streaming.log.events import storable
from streaming.models import ChatAttempt, ChatTurn, Conversation
from streaming.refusals import TooManyTurns
from streaming.states import TURN_UNFINISHED, TurnOrigin, TurnStage, TurnState
from streaming.turns.model_list import ChatModel

RUN_TURN = "streaming.run_turn"
# A running turn whose lease has run out, by the database's clock.
ORPHANED = Q(state=TurnState.RUNNING, lease_expires_at__lt=LeaseExpiry())
END_WITHIN_S = 120.0
NOTIFY_AGAIN_S = 10
_DETAIL_MAX = 1000
_WORD_MAX = 100


@dataclass(frozen=True)
class Claim:
    """One process's right to run a turn. `token` fences: a holder of another token changes nothing."""

    turn_id: int
    token: str


@dataclass(frozen=True)
class Ending:
    """How a turn ended, and why.

    `status` is the provider's HTTP status, `detail` its message, bounded; `provider_code` and `param` are its own words.
    """

    state: TurnState
    error_code: str = ""
    error_kind: str = ""
    status: int | None = None
    detail: str = ""
    retry_after_ms: int | None = None
    provider_code: str = ""
    param: str = ""


@dataclass(frozen=True)
class Result:
    """What a turn brought until it ended; stored at every end."""

    choices: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    attempts: Sequence[ChatAttempt] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NewTurn:
    """A turn as an entry point asks for it. `request` is the client's, without the fields that concern delivery."""

    tenant: Tenant
    model: ChatModel
    request: dict[str, Any]
    origin: TurnOrigin
    conversation: Conversation | None = None


def take(new: NewTurn) -> ChatTurn:
    """Stores the turn as queued; `notify_worker` then wakes a worker. Raises TooManyTurns."""
    with transaction.atomic():
        return _insert(new, state=TurnState.QUEUED)


def notify_worker(turn: ChatTurn) -> None:
    """Wakes a worker for a stored turn. Sends no query."""
    # Without an expiry: a late worker finds the turn ended, which costs no more than Celery's check of the date.
    wake_ups.notify_workers_now(RUN_TURN, str(turn.public_id))


def take_claimed(new: NewTurn) -> tuple[ChatTurn, Claim]:
    """Stores the turn as already claimed, for a caller that runs it itself. Raises TooManyTurns."""
    token = secrets.token_hex(16)
    with transaction.atomic():
        turn = _insert(new, **_claim_fields(token, uses_knowledge=new.model.uses_knowledge))
    return turn, Claim(turn.pk, token)


def claim(turn: ChatTurn) -> Claim | None:
    """Claims a queued turn. None if another has it or it has ended; so for a redelivered message."""
    token = secrets.token_hex(16)
    queued = ChatTurn.objects.filter(pk=turn.pk, state=TurnState.QUEUED)
    won = queued.update(**_claim_fields(token, uses_knowledge=turn.uses_knowledge))
    return Claim(turn.pk, token) if won else None


def renew(claims: Iterable[Claim]) -> int:
    """Renews the leases of these claims in one statement. Returns how many are still held."""
    tokens = [each.token for each in claims]
    return ChatTurn.objects.filter(claim_token__in=tokens, state=TurnState.RUNNING).update(lease_expires_at=_lease())


def enter(held: Claim, stage: TurnStage, **facts: Any) -> bool:
    """Writes the turn's stage, and facts such as its sources. False if the claim is lost."""
    return bool(_claimed(held).update(stage=stage, **facts))


def end(held: Claim, ending: Ending, result: Result, first_content_at: datetime | None = None) -> bool:
    """Ends the turn with its result, retried while the database is locked or away. False if the claim is lost."""

    def write() -> bool:
        with transaction.atomic():
            won = _claimed(held).update(
                **_end_fields(ending),
                choices=storable(result.choices),
                usage=storable(result.usage),
                reply_fields=storable(result.fields),
                first_content_at=first_content_at,
            )
            if won:
                for attempt in result.attempts:
                    attempt.turn_id = held.turn_id
                    # A retried write inserts again, whatever primary key the failed one had set.
                    attempt.pk = None
                ChatAttempt.objects.bulk_create(result.attempts)
            return bool(won)

    return retry_on_database_error(write, END_WITHIN_S)


def end_unclaimed(turn: ChatTurn, ending: Ending) -> bool:
    """Ends a turn that no worker has claimed. False if it is not queued any more."""
    return bool(ChatTurn.objects.filter(pk=turn.pk, state=TurnState.QUEUED).update(**_end_fields(ending)))


def request_cancel(turn: ChatTurn) -> bool:
    """Ends a queued turn as cancelled, or asks the worker of a running one to. False if it has ended."""
    if end_unclaimed(turn, Ending(TurnState.CANCELLED, codes.USER_CANCELLED)):
        return True
    asked = Q(cancel_requested_at=None)
    ChatTurn.objects.filter(asked, pk=turn.pk, state=TurnState.RUNNING).update(cancel_requested_at=Now())
    return ChatTurn.objects.filter(pk=turn.pk, state=TurnState.RUNNING).exists()


def request_cancel_surely(turn: ChatTurn) -> bool:
    """The same, again while the database is locked or away: a client that has hung up asks once."""
    return retry_on_database_error(lambda: request_cancel(turn), END_WITHIN_S)


def take_over_orphaned(turn: ChatTurn) -> Claim | None:
    """Claims a running turn whose lease has run out, to end it, not to run it again. None if it is not orphaned."""
    token = secrets.token_hex(16)
    lost = ChatTurn.objects.filter(ORPHANED, pk=turn.pk)
    return Claim(turn.pk, token) if lost.update(claim_token=token, lease_expires_at=_lease()) else None


def notify_worker_again(turn: ChatTurn) -> bool:
    """Wakes a worker again for a queued turn, at most every 10 s for all callers. Returns whether it did."""
    stale = Q(rung_at=None) | Q(rung_at__lt=Now() - timedelta(seconds=NOTIFY_AGAIN_S))
    with transaction.atomic():
        won = ChatTurn.objects.filter(stale, pk=turn.pk, state=TurnState.QUEUED).update(rung_at=Now())
        if won:
            transaction.on_commit(lambda: notify_worker(turn))
    return bool(won)


def ending_of(turn: ChatTurn) -> Ending:
    """How the turn ended, read from its row."""
    return Ending(
        TurnState(turn.state),
        turn.error_code,
        turn.error_kind,
        turn.error_status,
        turn.error_detail,
        turn.retry_after_ms,
        turn.provider_code,
        turn.error_param,
    )


def end_data(ending: Ending) -> dict[str, Any]:
    """The data of the end event."""
    return {
        "state": str(ending.state),
        "error_code": ending.error_code,
        "error_kind": ending.error_kind,
        "message": ending.detail,
        "status": ending.status,
        "retry_after_ms": ending.retry_after_ms,
        "provider_code": ending.provider_code,
        "param": ending.param,
    }


def _insert(new: NewTurn, **fields: Any) -> ChatTurn:
    # Locked, so that the count is exact: SQLite's transaction locks by itself.
    if connection.features.has_select_for_update:
        Tenant.objects.select_for_update(no_key=True).get(pk=new.tenant.pk)
    if ChatTurn.objects.filter(tenant=new.tenant, state__in=TURN_UNFINISHED).count() >= settings.CHAT_TURNS_PER_TENANT:
        raise TooManyTurns(f"There are {settings.CHAT_TURNS_PER_TENANT} unfinished turns already: wait for one to end.")
    turn = ChatTurn.objects.create(
        tenant=new.tenant,
        provider=new.model.provider,
        model=new.model.name,
        uses_knowledge=new.model.uses_knowledge,
        conversation=new.conversation,
        origin=new.origin,
        request=storable(new.request),
        created_at=Now(),
        **fields,
    )
    # For the reply alone: the row has the database's time.
    turn.created_at = timezone.now()
    return turn


def _claim_fields(token: str, *, uses_knowledge: bool) -> dict[str, Any]:
    return {
        "state": TurnState.RUNNING,
        "stage": TurnStage.RETRIEVING if uses_knowledge else TurnStage.STREAMING,
        "claim_token": token,
        "lease_expires_at": _lease(),
        "started_at": Now(),
    }


def _claimed(held: Claim) -> Any:
    return ChatTurn.objects.filter(pk=held.turn_id, claim_token=held.token, state=TurnState.RUNNING)


def _end_fields(ending: Ending) -> dict[str, Any]:
    return {
        "state": ending.state,
        "stage": "",
        "error_code": ending.error_code[:64],
        "error_kind": ending.error_kind[:40],
        "error_status": ending.status,
        "error_detail": storable(ending.detail[:_DETAIL_MAX]),
        "retry_after_ms": ending.retry_after_ms,
        "provider_code": storable(ending.provider_code[:_WORD_MAX]),
        "error_param": storable(ending.param[:_WORD_MAX]),
        "claim_token": "",
        "lease_expires_at": None,
        "ended_at": Now(),
    }


def _lease() -> Any:
    # The database's clock: the hosts of workers and readers may differ.
    return Now() + timedelta(milliseconds=settings.LEASE_MS)
