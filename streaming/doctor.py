"""The whole examination: what `embeddings.doctor` looks at, and chat's turns (docs/architecture.md, Commands)."""

from __future__ import annotations

from collections.abc import Iterable

from django.conf import settings

from embeddings.doctor.findings import Check, Finding, Status, error, examine, ok, warning
from embeddings.doctor.installation import DATABASE, GIT, SETTINGS, VAR_DIR
from embeddings.doctor.providers import PROVIDERS, SERVERS
from embeddings.doctor.sweeps import REPOSITORIES, RUNS, TENANTS
from embeddings.doctor.valkey import QUEUES, VALKEY
from embeddings.reports import facts
from embeddings.runtime.workers import START, START_BEAT
from streaming.models import ChatTurn
from streaming.states import TURN_UNFINISHED, TurnState
from streaming.turns import orphaned_turns


def examination(*, asks_providers: bool) -> list[Finding]:
    """Every finding. What needs the database or Valkey is left out where that is what is wrong. Takes seconds."""
    found = examine([SETTINGS, VAR_DIR, GIT, DATABASE, VALKEY])
    broken = {finding.name for finding in found if finding.status == Status.ERROR}
    further = [] if VALKEY.name in broken else [QUEUES]
    if DATABASE.name not in broken:
        further += [PROVIDERS, *([SERVERS] if asks_providers else []), TENANTS, REPOSITORIES, RUNS, TURNS]
    return found + examine(further)


def _turns() -> Iterable[Finding]:
    late = list(orphaned_turns.overdue_turns())
    queued = [turn for turn in late if turn.state == TurnState.QUEUED]
    lost = len(late) - len(queued)
    if queued:
        since = facts.moment(min(turn.created_at for turn in queued))
        limit = f"{settings.CHAT_CLAIM_WAIT_MS / 1000:g} s"
        detail = f"{len(queued)} queued for longer than {limit}, the oldest since {since}"
        yield error("chat turns", detail, START["chat"])
    if lost:
        yield warning("chat turns", f"{lost} at work under a lease that has run out: beat ends them", START_BEAT)
    if not late:
        unfinished = ChatTurn.objects.filter(state__in=TURN_UNFINISHED).count()
        yield ok("chat turns", f"{unfinished} at work, none of them late")


TURNS = Check("chat turns", _turns)
