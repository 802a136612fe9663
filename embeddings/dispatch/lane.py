"""The lane: one embedding task at an OpenAI-compatible server, cluster-wide (docs/architecture.md, Embedding).

Interactive texts first, but a batch overtaken for too long goes next; among batches, the outcome least recently
dispatched goes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched
from embeddings.runtime.retry import durably
from embeddings.timeouts import OnProviderTimeout, notify_provider_timeout

if TYPE_CHECKING:
    from embeddings.models import Provider

cancels_calls = True
keeps_late_replies = False


def admit(provider: Provider) -> Dispatched | None:
    """Dispatches the next task if the lane is free."""
    return task_queue.admit(provider.pk, _one, "fair")


def settle_and_admit(provider: Provider, task: Dispatched) -> tuple[bool, Dispatched | None]:
    """After a reply: frees the lane and dispatches the next task in one transaction; says whether the reply counts."""
    return task_queue.settle_and_admit(task, _one, "fair")


def likely_next(provider: Provider) -> int | None:
    """The task that will most likely be dispatched next."""
    return task_queue.peek(provider.pk, "fair")


def finish(task: Dispatched, error: Exception, code: str, on_provider_timeout: OnProviderTimeout | None) -> bool:
    """The final failure of a task: its owner hears of a provider timeout first, and only then is the lane free.

    A holder whose lease was lost notifies nobody. Returns whether the task was still held.
    """
    if not task_queue.is_held(task):
        return False
    notify_provider_timeout(error, on_provider_timeout)
    return durably(lambda: task_queue.fail(task, code, str(error)))


def _one(cap: object) -> int:
    """A lane is single-file whatever the row says."""
    return 1
