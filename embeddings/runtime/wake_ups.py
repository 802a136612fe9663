"""Wakes workers after a commit. A lost wake-up loses nothing: rows are the truth, and beat sends it again."""

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

# Expire wake-ups after an hour, so that a worker that starts late does not face a backlog.
EXPIRES_S = 3600
_WARN_AGAIN_AFTER_S = 60.0
_WAIT_S = 1.0
_notifying_thread = ThreadPoolExecutor(1, thread_name_prefix="wake-ups")
_warned_at: list[float] = []

DRAIN = "embeddings.drain_provider"
SCAN = "embeddings.scan_run"
ADVANCE = "embeddings.advance_run"


def notify_workers(task_name: str, *arguments: Any, after_ms: int = 0) -> None:
    """Sends the Celery task's message once the current transaction has committed, due `after_ms` later.

    Never raises; waits for a few seconds at most.
    """
    when = {"countdown": after_ms / 1000} if after_ms else {}
    transaction.on_commit(lambda: notify_workers_now(task_name, *arguments, expires=EXPIRES_S, **when))


def notify_workers_now(task_name: str, *arguments: Any, **when: float) -> None:
    """The same at once, whatever the current transaction does; `when` as Celery takes it."""
    try:
        valkey.ensure_server()
        current_app.send_task(task_name, args=arguments, retry=False, ignore_result=True, **when)
    except (OperationalError, *valkey.UNREACHABLE) as error:
        # Once a minute: a sweep that runs without a broker sends many in vain, and works all the same.
        now = time.monotonic()
        if not _warned_at or now - _warned_at[0] > _WARN_AGAIN_AFTER_S:
            _warned_at[:] = [now]
            logger.warning("no wake-up sent (%s): beat or a follower will see the rows", type(error).__name__)


async def in_notifying_thread(notify: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls `notify` in the one thread of this process that talks to the broker for its loop. Waits a second at most."""
    notifying = asyncio.get_running_loop().run_in_executor(_notifying_thread, lambda: notify(*args, **kwargs))
    await asyncio.wait([notifying], timeout=_WAIT_S)


def no_worker_listens() -> bool:
    """Whether there is certainly no worker: each subscribes to the workers' common channel, by a pattern."""
    try:
        return bool(valkey.client().pubsub_numpat() == 0)
    except valkey.UNREACHABLE:
        # Without a broker no wake-up arrives.
        return True
