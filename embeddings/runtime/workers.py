"""Celery's workers: the queues that running ones consume, and the command lines that start them."""

from __future__ import annotations

from collections import Counter

from celery import current_app
from django.conf import settings

_SWEEPS = "celery -A project worker -Q sweeps,embeddings,housekeeping -P threads -c 16"
START = {
    "sweeps": _SWEEPS,
    "embeddings": _SWEEPS,
    "housekeeping": _SWEEPS,
    "chat": "celery -A project worker -Q chat -P threads -c 256",
}
START_BEAT = "celery -A project beat"


def queues() -> list[str]:
    """Every queue that a task is routed to."""
    routes = settings.CELERY_TASK_ROUTES.values()
    return sorted({settings.CELERY_TASK_DEFAULT_QUEUE, *(route["queue"] for route in routes)})


def takers_by_queue(within_s: float) -> Counter[str]:
    """How many workers consume each queue, of those that answer in time. Waits for all of `within_s`.

    Raises kombu's OperationalError, or one of `valkey.UNREACHABLE`, where the broker is away.
    """
    answers = current_app.control.inspect(timeout=within_s).active_queues() or {}
    return Counter(queue["name"] for consumed in answers.values() for queue in consumed)


def takers(queue: str, within_s: float) -> int:
    """The same for one queue."""
    return takers_by_queue(within_s)[queue]
