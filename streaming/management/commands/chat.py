"""`manage.py chat`: asks a tenant's model one question over its knowledge base and prints the answer as it arrives.

The command runs the turn itself and needs no worker; the turn is stored and logged like any other.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser

from embeddings import registry
from embeddings.errors import UsageError
from embeddings.management.base import SluicegateCommand, add_json
from embeddings.management.rendering import printable
from streaming.http import turn_requests
from streaming.log import events
from streaming.models import ChatTurn
from streaming.refusals import TooManyTurns, UnknownModel
from streaming.states import TurnOrigin, TurnState
from streaming.turns import claims, transitions, turn_run
from streaming.turns.claims import HeldClaim
from streaming.turns.model_list import default_model


class Failed(CommandError):
    """The question was valid, but its turn did not complete."""


class Command(SluicegateCommand):
    help = "Asks a tenant's model, over its knowledge base. Exit status 0 when the answer is complete, 1 otherwise."
    examples = 'chat acme "How does the lane decide?"\nchat acme "Write a haiku" --no-knowledge --json'

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", help="the tenant's slug")
        parser.add_argument("question", help="the question, in plain words")
        parser.add_argument(
            "--no-knowledge", action="store_true", help="ask the model alone, without the tenant's rows"
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        turn, claim = self._take(options)
        with claims.held(claim) as held, _cancelled_by_ctrl_c(held):
            listener = None if options["json"] else self._show
            turn_run.run_held(turn, held, listener=listener)
        turn.refresh_from_db()
        if options["json"]:
            shown = ("number", "end_state", "error_kind", "chunks", "bytes")
            attempts = turn_requests.rendered(turn)["attempts"]
            self.print_json(
                {
                    "turn": str(turn.public_id),
                    "state": turn.state,
                    "answer": turn.answer,
                    "error_code": turn.error_code,
                    "attempts": [{name: attempt[name] for name in shown} for attempt in attempts],
                    "sources": turn.sources,
                }
            )
        else:
            self.stdout.write("")
            for source in turn.sources:
                place = f"{source['repository']} {source['path']}:{source['start_line']}-{source['end_line']}"
                self.stdout.write(f"[{source['number']}] {printable(place)}")
        if turn.state != TurnState.COMPLETED:
            raise Failed(f"{turn.state}: {turn.error_code} {printable(turn.error_detail)}".rstrip())

    def _take(self, options: dict[str, Any]) -> tuple[ChatTurn, transitions.Claim]:
        tenant = registry.find_active_tenant(options["tenant"])
        if not options["question"].strip():
            raise UsageError("the question is empty")
        request = {"messages": [{"role": "user", "content": options["question"]}]}
        try:
            model = default_model(tenant, uses_knowledge=not options["no_knowledge"])
            return turn_requests.take_claimed(transitions.NewTurn(tenant, model, request, TurnOrigin.COMMAND))
        except UnknownModel as error:
            raise UsageError(f"{error} `manage.py tenant set {tenant} --chat-provider ...` gives it one.") from error
        except TooManyTurns as error:
            raise Failed(str(error)) from error

    def _show(self, kind: str, attempt: int, data: dict[str, Any]) -> None:
        """Prints an event. Runs on the event loop's thread, while the command's own thread waits."""
        if kind == events.DELTA and data["choice"] == 0:
            self.stdout.write(printable(data["delta"].get("content") or ""), ending="")
            self.stdout.flush()
        elif kind == events.ATTEMPT and attempt > 1:
            self.note(f"attempt {attempt}")


@contextlib.contextmanager
def _cancelled_by_ctrl_c(held: HeldClaim) -> Iterator[None]:
    """Ctrl-C cancels the turn: closes the provider's socket and keeps the text so far."""
    before = signal.signal(signal.SIGINT, lambda number, frame: held.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
