"""Rings workers after a commit. A bell that is lost loses nothing: rows are the truth, and beat rings again."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

from embeddings import valkey

logger = logging.getLogger(__name__)

# Where no worker listens for hours, what is rung meanwhile is not all heard by the first that comes.
EXPIRES_S = 3600
_SAY_AGAIN_AFTER_S = 60.0
_said_at: list[float] = []

DRAIN = "embeddings.drain_provider"
SCAN = "embeddings.scan_run"
ADVANCE = "embeddings.advance_run"


def ring(task_name: str, *arguments: Any, after_ms: int = 0, expires_s: int | None = EXPIRES_S) -> None:
    """Sends the task's message once the current transaction has committed, to be heard `after_ms` later.

    Never raises, never waits long.
    """
    when: dict[str, Any] = {"countdown": after_ms / 1000} if after_ms else {}
    if expires_s is not None:
        when["expires"] = expires_s
    transaction.on_commit(lambda: _send(task_name, arguments, when))


def nobody_listens() -> bool:
    """Whether there is no worker for certain: each subscribes to the workers' common channel, by a pattern."""
    try:
        return bool(valkey.client().pubsub_numpat() == 0)
    except valkey.UNREACHABLE:
        # Without a broker no bell is heard.
        return True


def _send(task_name: str, arguments: tuple[Any, ...], when: dict[str, Any]) -> None:
    try:
        valkey.ensure_server()
        current_app.send_task(task_name, args=arguments, retry=False, ignore_result=True, **when)
    except (OperationalError, *valkey.UNREACHABLE) as error:
        _say_unrung(error)


def _say_unrung(error: Exception) -> None:
    """Once a minute: a sweep without any broker rings in vain many times, and is none the worse for it."""
    now = time.monotonic()
    if not _said_at or now - _said_at[0] > _SAY_AGAIN_AFTER_S:
        _said_at[:] = [now]
        logger.warning("the broker could not be rung (%s): beat or a follower will see the rows", type(error).__name__)
