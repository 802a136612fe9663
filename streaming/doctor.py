"""All checks of an installation: those of `embeddings.doctor`, and of chat turns (docs/architecture.md, Commands)."""

from __future__ import annotations

from collections.abc import Iterable

from django.conf import settings

from embeddings.doctor.findings import Finding, Status, check, error, examine, ok, warning
from embeddings.doctor.installation import check_database, check_git, check_settings, check_var_dir
from embeddings.doctor.providers import check_providers, check_servers
from embeddings.doctor.sweeps import check_repositories, check_runs, check_tenants
from embeddings.doctor.valkey import check_queues, check_valkey
from embeddings.reports import facts
from embeddings.runtime.workers import START, START_BEAT
from streaming.models import ChatTurn
from streaming.states import TURN_UNFINISHED, TurnState
from streaming.turns import orphaned_turns


def examination(*, asks_providers: bool) -> list[Finding]:
    """All findings; takes seconds. If the database or Valkey is down, skips the checks that need it."""
    found = examine([check_settings, check_var_dir, check_git, check_database, check_valkey])
    broken = {finding.name for finding in found if finding.status == Status.ERROR}
    further = [] if check_valkey.name in broken else [check_queues]
    if check_database.name not in broken:
        further += [check_providers, *([check_servers] if asks_providers else [])]
        further += [check_tenants, check_repositories, check_runs, check_turns]
    return found + examine(further)


@check("chat turns")
def check_turns() -> Iterable[Finding]:
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
