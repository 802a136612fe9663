"""Retries a transaction while the database is locked or away for a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from django.db import InterfaceError, OperationalError, connection

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DATABASE_AWAY = (OperationalError, InterfaceError)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


def retry_on_database_error(transact: Callable[[], T], within_s: float = 30.0) -> T:
    """Runs one idempotent transaction, again while the database is locked or unreachable, for at most `within_s`.

    Raises the database's own error once the time is up, and any other error at once. Inside a transaction it tries once:
    the caller's transaction is broken by then.
    """
    deadline = time.monotonic() + within_s
    pause = FIRST_PAUSE_S
    while True:
        try:
            return transact()
        except DATABASE_AWAY as error:
            if connection.in_atomic_block or time.monotonic() + pause > deadline:
                raise
            logger.warning("database error, trying again: %s", type(error).__name__)
            connection.close()
        time.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_S)


def retried(transact: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that is one idempotent transaction: `retry_on_database_error` around each call."""

    @wraps(transact)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        return retry_on_database_error(lambda: transact(*args, **kwargs))

    return again
