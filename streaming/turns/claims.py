"""The claims that this process holds: leases renewed and cancels noticed with one statement for all turns.

A process may run hundreds of turns: a renewal and a query of the cancel flag for each would be thousands of statements.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from django.conf import settings

from embeddings.runtime import leases, shutdown
from streaming.models import ChatTurn
from streaming.turns import transitions
from streaming.turns.transitions import Claim

# A client's hang-up must close the provider's socket within a second.
CHECK_S = 0.3


class HeldClaim:
    """A claim while its turn runs here. The flags hold why it was interrupted; the run reads them."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.is_cancelled = False
        self.is_lost = False
        self.is_shut_down = False
        self._lock = threading.Lock()
        self._task: asyncio.Task[object] | None = None

    @property
    def is_interrupted(self) -> bool:
        return self.is_cancelled or self.is_lost or self.is_shut_down

    def attach(self) -> None:
        """Lets an interruption cancel the current task. Raises CancelledError if there was one already."""
        with self._lock:
            self._task = asyncio.current_task()
        if self.is_interrupted:
            raise asyncio.CancelledError

    def detach(self) -> None:
        with self._lock:
            self._task = None

    def cancel(self) -> None:
        self.is_cancelled = True
        self._interrupt()

    def lose(self) -> None:
        self.is_lost = True
        self._interrupt()

    def shut_down(self) -> None:
        self.is_shut_down = True
        self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._cancel_attached)

    def _cancel_attached(self) -> None:
        # On the loop: a task that has detached meanwhile must not be interrupted any more.
        if self._task is not None:
            self._task.cancel()
            self._task = None


_lock = threading.Lock()
_held: dict[str, HeldClaim] = {}
_rounds = contextlib.ExitStack()


@contextlib.contextmanager
def held(claim: Claim) -> Iterator[HeldClaim]:
    """While inside, the claim's lease is renewed, and a cancel or a loss interrupts what runs under it."""
    mine = HeldClaim(claim)
    with _lock:
        if not _held:
            _rounds.enter_context(leases.repeated(renew_all, settings.LEASE_RENEW_MS / 1000))
            _rounds.enter_context(leases.repeated(check_all, CHECK_S))
        _held[claim.token] = mine
    if shutdown.requested.is_set():
        mine.shut_down()
    try:
        yield mine
    finally:
        with _lock:
            _held.pop(claim.token, None)
            if not _held:
                _rounds.close()


def shut_down() -> None:
    """Interrupts every turn of this process: the worker is asked to stop."""
    shutdown.requested.set()
    for each in _all_held().values():
        each.shut_down()


def renew_all() -> bool:
    """Renews the leases of all claims that this process holds. Always True: it is called again."""
    if mine := _all_held():
        transitions.renew(each.claim for each in mine.values())
    return True


def check_all() -> bool:
    """Interrupts the turns that were cancelled, or whose claim is lost. Always True: it is called again.

    Removing a tenant cancels its turns: nothing more is bought on its behalf.
    """
    mine = _all_held()
    rows = ChatTurn.objects.filter(claim_token__in=list(mine))
    facts = rows.values_list("claim_token", "cancel_requested_at", "tenant__is_active") if mine else ()
    still = {token: asked_at is not None or not is_active for token, asked_at, is_active in facts}
    for token, each in mine.items():
        if token not in still:
            each.lose()
        elif still[token] and not each.is_cancelled:
            each.cancel()
    return True


def _all_held() -> dict[str, HeldClaim]:
    with _lock:
        return dict(_held)
