"""A turn's transitions: each one compare-and-set on its row (docs/architecture.md, Data and states, ChatTurn).

Taken, claimed by one worker under a lease, ended once. Whoever has lost the claim can change nothing any more. The run
of a turn, from retrieval to its last attempt, is `streaming.turns.turn_run`.
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
from embeddings.runtime.retry import retry_on_database_error
from streaming import codes
from streaming.log.events import storable
from streaming.models import ChatAttempt, ChatTurn, Conversation
from streaming.refusals import TooManyTurns
from streaming.states import TURN_UNFINISHED, TurnOrigin, TurnStage, TurnState
from streaming.turns.model_list import Offer

RUN_TURN = "streaming.run_turn"
END_WITHIN_S = 120.0
RING_AGAIN_S = 10
_DETAIL_MAX = 1000


@dataclass(frozen=True)
class Claim:
    """One process's right to run a turn. `token` fences: whoever holds another one is not it."""

    turn_id: int
    token: str


@dataclass(frozen=True)
class Ending:
    """How a turn ended, and why. `status` is the provider's HTTP status, `detail` its message, bounded."""

    state: TurnState
    error_code: str = ""
    error_kind: str = ""
    status: int | None = None
    detail: str = ""
    retry_after_ms: int | None = None


@dataclass(frozen=True)
class Result:
    """What a turn brought until it ended: kept at every end, whatever there was."""

    choices: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    attempts: Sequence[ChatAttempt] = ()


@dataclass(frozen=True)
class NewTurn:
    """What a door asks for: the offer names provider and model, `request` is the client's, delivery fields aside."""

    tenant: Tenant
    offer: Offer
    request: dict[str, Any]
    origin: TurnOrigin
    conversation: Conversation | None = None


def take(new: NewTurn) -> ChatTurn:
    """Stores the turn as queued, for `ring` to ring for. Raises TooManyTurns."""
    with transaction.atomic():
        return _insert(new, state=TurnState.QUEUED)


def ring(turn: ChatTurn) -> None:
    """Rings a worker for a stored turn. Asks nothing of the database."""
    # An old bell finds its turn ended, at no more than Celery's look at its date would cost.
    wake_ups.notify_workers_now(RUN_TURN, str(turn.public_id))


def take_claimed(new: NewTurn) -> tuple[ChatTurn, Claim]:
    """Stores the turn as already claimed, for a caller that runs it itself. Raises TooManyTurns."""
    token = _new_token()
    with transaction.atomic():
        turn = _insert(new, **_claim_fields(token, uses_knowledge=new.offer.uses_knowledge))
    return turn, Claim(turn.pk, token)


def claim(turn: ChatTurn) -> Claim | None:
    """The right to run a queued turn, or None: another has it, or it has ended. A redelivered message gets None."""
    token = _new_token()
    queued = ChatTurn.objects.filter(pk=turn.pk, state=TurnState.QUEUED)
    won = queued.update(**_claim_fields(token, uses_knowledge=turn.uses_knowledge))
    return Claim(turn.pk, token) if won else None


def renew(claims: Iterable[Claim]) -> int:
    """Lengthens the leases of these claims, in one statement; how many still stood."""
    tokens = [each.token for each in claims]
    return ChatTurn.objects.filter(claim_token__in=tokens, state=TurnState.RUNNING).update(lease_expires_at=_lease())


def enter(held: Claim, stage: TurnStage, **facts: Any) -> bool:
    """Notes what the turn is doing, and facts such as its sources; whether the claim still stands."""
    return bool(_claimed(held).update(stage=stage, **facts))


def end(held: Claim, ending: Ending, result: Result, first_content_at: datetime | None = None) -> bool:
    """Ends the turn with what it brought; whether the claim still stood. A locked database is waited for."""

    def write() -> bool:
        with transaction.atomic():
            won = _claimed(held).update(
                **_end_fields(ending),
                choices=storable(result.choices),
                usage=storable(result.usage),
                first_content_at=first_content_at,
            )
            if won:
                ChatAttempt.objects.bulk_create([_attempt_of(held, attempt) for attempt in result.attempts])
            return bool(won)

    return retry_on_database_error(write, END_WITHIN_S)


def end_unclaimed(turn: ChatTurn, ending: Ending) -> bool:
    """Ends a turn that nobody has claimed; whether it was still queued."""
    return bool(ChatTurn.objects.filter(pk=turn.pk, state=TurnState.QUEUED).update(**_end_fields(ending)))


def request_cancel(turn: ChatTurn) -> bool:
    """Ends a queued turn as cancelled, or asks the worker of a running one to; whether it was unfinished."""
    if end_unclaimed(turn, Ending(TurnState.CANCELLED, codes.USER_CANCELLED)):
        return True
    asked = Q(cancel_requested_at=None)
    ChatTurn.objects.filter(asked, pk=turn.pk, state=TurnState.RUNNING).update(cancel_requested_at=timezone.now())
    return ChatTurn.objects.filter(pk=turn.pk, state=TurnState.RUNNING).exists()


def take_over_lost(turn: ChatTurn) -> Claim | None:
    """The claim of a running turn whose worker has let its lease run out, or None. To end it, not to run it again."""
    token = _new_token()
    lost = ChatTurn.objects.filter(pk=turn.pk, state=TurnState.RUNNING, lease_expires_at__lt=Now())
    return Claim(turn.pk, token) if lost.update(claim_token=token, lease_expires_at=_lease()) else None


def ring_again(turn: ChatTurn) -> bool:
    """Rings for a turn that has stood queued, at most every 10 s whoever asks; whether it rang."""
    before = timezone.now() - timedelta(seconds=RING_AGAIN_S)
    stale = Q(rung_at=None) | Q(rung_at__lt=before)
    with transaction.atomic():
        won = ChatTurn.objects.filter(stale, pk=turn.pk, state=TurnState.QUEUED).update(rung_at=timezone.now())
        if won:
            transaction.on_commit(lambda: ring(turn))
    return bool(won)


def is_lost(turn: ChatTurn) -> bool:
    """Whether the row says that its worker is gone."""
    expires = turn.lease_expires_at
    return turn.state == TurnState.RUNNING and expires is not None and expires < timezone.now()


def ending_of(turn: ChatTurn) -> Ending:
    """How the row says that the turn ended."""
    return Ending(
        TurnState(turn.state),
        turn.error_code,
        turn.error_kind,
        turn.error_status,
        turn.error_detail,
        turn.retry_after_ms,
    )


def end_data(ending: Ending) -> dict[str, Any]:
    """What the end event says."""
    return {
        "state": str(ending.state),
        "error_code": ending.error_code,
        "error_kind": ending.error_kind,
        "message": ending.detail,
        "status": ending.status,
        "retry_after_ms": ending.retry_after_ms,
    }


def _insert(new: NewTurn, **fields: Any) -> ChatTurn:
    # The lock that makes the count true: on SQLite the transaction itself, elsewhere the tenant's row.
    if connection.features.has_select_for_update:
        Tenant.objects.select_for_update(no_key=True).get(pk=new.tenant.pk)
    if ChatTurn.objects.filter(tenant=new.tenant, state__in=TURN_UNFINISHED).count() >= settings.CHAT_TURNS_PER_TENANT:
        raise TooManyTurns(f"There are {settings.CHAT_TURNS_PER_TENANT} unfinished turns already: wait for one to end.")
    return ChatTurn.objects.create(
        tenant=new.tenant,
        provider=new.offer.provider,
        model=new.offer.model,
        uses_knowledge=new.offer.uses_knowledge,
        conversation=new.conversation,
        origin=new.origin,
        request=storable(new.request),
        **fields,
    )


def _claim_fields(token: str, *, uses_knowledge: bool) -> dict[str, Any]:
    return {
        "state": TurnState.RUNNING,
        "stage": TurnStage.RETRIEVING if uses_knowledge else TurnStage.STREAMING,
        "claim_token": token,
        "lease_expires_at": _lease(),
        "started_at": timezone.now(),
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
        "claim_token": "",
        "lease_expires_at": None,
        "ended_at": timezone.now(),
    }


def _attempt_of(held: Claim, attempt: ChatAttempt) -> ChatAttempt:
    attempt.turn_id = held.turn_id
    # A write that is tried again must insert again, whatever the failed one had set.
    attempt.pk = None
    return attempt


def _new_token() -> str:
    return secrets.token_hex(16)


def _lease() -> Any:
    # The database's clock: the machines of workers and readers need not agree about the time.
    return Now() + timedelta(milliseconds=settings.LEASE_MS)
