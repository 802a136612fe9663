"""The claims that this process holds: leases renewed and cancels seen by one thread, with one statement for all turns.

A process may run hundreds of turns; a renewal and a look at the cancel flag for each would be thousands of statements.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

from django.conf import settings
from django.db import DatabaseError, InterfaceError, connections

from embeddings.runtime import shutdown
from streaming.models import ChatTurn
from streaming.turns import transitions
from streaming.turns.transitions import Claim

logger = logging.getLogger(__name__)

# A hang-up must have reached the provider's socket within a second.
LOOK_S = 0.3


class HeldClaim:
    """A claim while its turn runs here. The flags say why it was interrupted; the run reads them, whoever set them."""

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
        # On the loop: a task that has detached meanwhile is past what an interruption may cut.
        if self._task is not None:
            self._task.cancel()
            self._task = None


_lock = threading.Lock()
_held: dict[str, HeldClaim] = {}
_keeper_of: dict[str, int] = {}
_emptied = threading.Event()


@contextlib.contextmanager
def held(claim: Claim) -> Iterator[HeldClaim]:
    """While inside, the claim's lease is renewed, and a cancel or a loss interrupts what runs under it."""
    mine = HeldClaim(claim)
    with _lock:
        _held[claim.token] = mine
        _ensure_keeper()
    if shutdown.requested.is_set():
        mine.shut_down()
    try:
        yield mine
    finally:
        with _lock:
            _held.pop(claim.token, None)
            if not _held:
                _emptied.set()


def shut_down() -> None:
    """Interrupts every turn of this process: the worker is asked to stop."""
    shutdown.requested.set()
    with _lock:
        mine = list(_held.values())
    for each in mine:
        each.shut_down()


def look(renewing: bool) -> None:
    """One round of the keeper: renew the leases if it is time, then tell turns that were cancelled, or lost.

    A tenant that is removed cancels its turns: nothing is paid for on its behalf any more.
    """
    with _lock:
        mine = dict(_held)
    if not mine:
        return
    if renewing:
        transitions.renew(each.claim for each in mine.values())
    rows = ChatTurn.objects.filter(claim_token__in=list(mine))
    facts = rows.values_list("claim_token", "cancel_requested_at", "tenant__is_active")
    still = {token: asked_at is not None or not is_active for token, asked_at, is_active in facts}
    for token, each in mine.items():
        if token not in still:
            each.lose()
        elif still[token] and not each.is_cancelled:
            each.cancel()


def _ensure_keeper() -> None:
    # Keyed by process: a thread does not survive a fork.
    if _keeper_of.get("pid") != os.getpid():
        _keeper_of["pid"] = os.getpid()
        threading.Thread(target=_keep, name="chat-keeper", daemon=True).start()


def _keep() -> None:
    renewed_at = time.monotonic()
    while True:
        if _emptied.wait(LOOK_S):
            _emptied.clear()
            # Between turns the keeper holds no connection.
            connections.close_all()
            continue
        now = time.monotonic()
        renewing = now - renewed_at >= settings.LEASE_RENEW_MS / 1000
        try:
            look(renewing)
            renewed_at = now if renewing else renewed_at
        except (DatabaseError, InterfaceError) as error:
            # The next round tries again; if the database stays away, the leases are rightly lost.
            logger.warning("the claims could not be looked at: %s", type(error).__name__)
            connections.close_all()
