"""Leases kept alive: one keeper thread in each process, for all that it holds (docs/architecture.md, Data and states)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from django.conf import settings
from django.db import connections

logger = logging.getLogger(__name__)

# A call that failed is tried again soon: a lease lasts three intervals.
_TRY_AGAIN_S = 1.0
# Between calls that are further apart than this, the keeper holds no connection.
_CONNECTION_KEPT_S = 1.0


@dataclass(eq=False)
class _Repeated:
    call: Callable[[], bool]
    every_s: float
    due_at: float


_lock = threading.Lock()
_repeated: set[_Repeated] = set()
_wake = threading.Event()
_sleeps_until = 0.0
_keeper_of: dict[str, int] = {}


def kept(renew: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """While inside, calls `renew` every `LEASE_RENEW_MS`; once it returns False the lease is gone, and it is called no more."""
    return repeated(renew, settings.LEASE_RENEW_MS / 1000)


@contextlib.contextmanager
def repeated(call: Callable[[], bool], every_s: float) -> Iterator[None]:
    """While inside, the keeper calls `call` every `every_s` seconds, until it returns False. What it raises is logged."""
    mine = _Repeated(call, every_s, time.monotonic() + every_s)
    with _lock:
        _repeated.add(mine)
        # Keyed by process: a thread does not survive a fork.
        if _keeper_of.get("pid") != os.getpid():
            _keeper_of["pid"] = os.getpid()
            threading.Thread(target=_keep, name="sluicegate-keeper", daemon=True).start()
        elif mine.due_at < _sleeps_until:
            _wake.set()
    try:
        yield
    finally:
        with _lock:
            _repeated.discard(mine)


def call_due(now: float) -> None:
    """One round of the keeper: each call that is due by `now` (monotonic seconds)."""
    with _lock:
        due = [each for each in _repeated if each.due_at <= now]
    for each in due:
        each.due_at = now + each.every_s
        try:
            goes_on = each.call()
        except Exception as error:
            # Whatever one call raises, the other leases of this process must be renewed.
            logger.warning("the keeper's call failed, trying again: %s", type(error).__name__)
            connections.close_all()
            each.due_at = now + min(_TRY_AGAIN_S, each.every_s)
            continue
        if not goes_on:
            with _lock:
                _repeated.discard(each)


def _keep() -> None:
    global _sleeps_until
    while True:
        with _lock:
            _sleeps_until = min((each.due_at for each in _repeated), default=float("inf"))
        pause_s = _sleeps_until - time.monotonic()
        if pause_s > _CONNECTION_KEPT_S:
            connections.close_all()
        if _wake.wait(None if pause_s == float("inf") else max(0.0, pause_s)):
            _wake.clear()
        else:
            call_due(time.monotonic())
