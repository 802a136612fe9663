"""Rings workers after a commit. A bell that is lost loses nothing: rows are the truth, and beat rings again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec

from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

from embeddings.runtime import valkey

P = ParamSpec("P")

logger = logging.getLogger(__name__)

# Where no worker listens for hours, what is rung meanwhile is not all heard by the first that comes.
EXPIRES_S = 3600
_SAY_AGAIN_AFTER_S = 60.0
_WAIT_S = 1.0
_ringing_thread = ThreadPoolExecutor(1, thread_name_prefix="ringing")
_said_at: list[float] = []

DRAIN = "embeddings.drain_provider"
SCAN = "embeddings.scan_run"
ADVANCE = "embeddings.advance_run"


def ring(task_name: str, *arguments: Any, after_ms: int = 0) -> None:
    """Sends the task's message once the current transaction has committed, to be heard `after_ms` later.

    Never raises, waits for some seconds at the most.
    """
    when = {"countdown": after_ms / 1000} if after_ms else {}
    transaction.on_commit(lambda: ring_now(task_name, *arguments, expires=EXPIRES_S, **when))


async def in_ringing_thread(ring_it: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls it in the one thread of this process that rings for its loop. Waits for it for a second at the most."""
    ringing = asyncio.get_running_loop().run_in_executor(_ringing_thread, lambda: ring_it(*args, **kwargs))
    await asyncio.wait([ringing], timeout=_WAIT_S)


def nobody_listens() -> bool:
    """Whether there is no worker for certain: each subscribes to the workers' common channel, by a pattern."""
    try:
        return bool(valkey.client().pubsub_numpat() == 0)
    except valkey.UNREACHABLE:
        # Without a broker no bell is heard.
        return True


def ring_now(task_name: str, *arguments: Any, **when: float) -> None:
    """The same at once, whatever the current transaction; `when` as Celery takes it."""
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
