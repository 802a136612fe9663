"""Leases kept alive: one keeper thread per process renews whatever this process holds (docs/architecture.md, Shape)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator

from django.conf import settings
from django.db import DatabaseError, InterfaceError, connections

logger = logging.getLogger(__name__)

Renew = Callable[[], bool]

_lock = threading.Lock()
_kept: dict[object, Renew] = {}
_keeper_of: dict[str, int] = {}


@contextlib.contextmanager
def kept(renew: Renew) -> Iterator[None]:
    """While inside, calls `renew` every `LEASE_RENEW_MS`; once it returns False, the lease is gone and is let go."""
    key = object()
    with _lock:
        _kept[key] = renew
        _ensure_keeper()
    try:
        yield
    finally:
        with _lock:
            _kept.pop(key, None)


def renew_all() -> None:
    """One round of the keeper."""
    with _lock:
        round_ = list(_kept.items())
    for key, renew in round_:
        try:
            still_held = renew()
        except (DatabaseError, InterfaceError) as error:
            # The next round tries again; if the database stays away, the lease is rightly lost.
            logger.warning("a lease could not be renewed: %s", type(error).__name__)
            connections.close_all()
            continue
        if not still_held:
            with _lock:
                _kept.pop(key, None)


def _ensure_keeper() -> None:
    # Keyed by process: a thread does not survive a fork.
    if _keeper_of.get("pid") != os.getpid():
        _keeper_of["pid"] = os.getpid()
        threading.Thread(target=_keep, name="sluicegate-keeper", daemon=True).start()


def _keep() -> None:
    pause = threading.Event()
    while not pause.wait(settings.LEASE_RENEW_MS / 1000):
        renew_all()
        # Between rounds the keeper holds no connection.
        connections.close_all()
