"""The Celery application. Messages are wake-ups: losing one loses nothing, a duplicate does nothing."""

from __future__ import annotations

import importlib
import os
from typing import Any

from celery import Celery, signals

from project.runtime.gc_freeze import keep_what_is_loaded

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

app = Celery("sluicegate")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

_POOL = "celery.concurrency.thread:TaskPool"


@signals.worker_init.connect
def _prepare_worker(sender: Any, **_: Any) -> None:
    """Refuses any pool but threads, starts the broker if needed, and imports the SDK before the first task needs it."""
    pool = getattr(sender, "pool_cls", None)
    if f"{getattr(pool, '__module__', '')}:{getattr(pool, '__name__', '')}" != _POOL:
        raise SystemExit(
            "Sluicegate's workers run threads over one event loop per process: start the worker with -P threads."
        )
    from embeddings.runtime import bulkheads, valkey

    valkey.ensure_server()
    if type(concurrency := getattr(sender, "concurrency", None)) is int:
        bulkheads.DRAINS.threads = concurrency
    importlib.import_module("openai")


@signals.worker_ready.connect
def _keep_what_is_loaded(**_: Any) -> None:
    keep_what_is_loaded()


@signals.worker_shutting_down.connect
def _stop_waiting(**_: Any) -> None:
    """Requeues tasks that wait for a provider, so that the worker stops within seconds."""
    from embeddings.runtime import shutdown

    shutdown.requested.set()


@signals.worker_shutdown.connect
def _end_work(**_: Any) -> None:
    """Waits for the work that Celery's pool has handed over."""
    from embeddings.dispatch import waits
    from embeddings.runtime import bulkheads

    waits.end(bulkheads.DRAINS)
    for each in (bulkheads.SCANS, bulkheads.ROUNDS, bulkheads.PURGES):
        each.end()
