"""Admission: native Ollama's cap and its waiters (docs/architecture.md, Embedding).

At most `max_in_flight` calls are out, cluster-wide; interactive texts first, then as they were put, but a batch that has
been overtaken for too long goes next. The slot belongs to the HTTP call, never to its caller: a cancelled caller hears at
once, while the slot stays taken until the call has ended, and vectors that come after all are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched
from embeddings.errors import ProviderConfigurationError
from embeddings.runtime.retry import durably
from embeddings.timeouts import OnProviderTimeout, notify_provider_timeout

if TYPE_CHECKING:
    from embeddings.models import Provider

cancels_calls = False
keeps_late_replies = True


def admit(provider: Provider) -> Dispatched | None:
    """Dispatches the next task if a slot is free under the cap as it is now; raises ProviderConfigurationError."""
    return task_queue.admit(provider.pk, cap_of, "fifo")


def settle_and_admit(provider: Provider, task: Dispatched) -> tuple[bool, Dispatched | None]:
    """After a reply: frees the slot and dispatches the next task in one transaction; says whether the reply counts."""
    return task_queue.settle_and_admit(task, cap_of, "fifo")


def likely_next(provider: Provider) -> int | None:
    """The task that will most likely be dispatched next."""
    return task_queue.peek(provider.pk, "fifo")


def finish(task: Dispatched, error: Exception, code: str, on_provider_timeout: OnProviderTimeout | None) -> bool:
    """The final failure of a task's call: its owner hears of a provider timeout first, and only then is the slot free.

    A holder whose lease was lost notifies nobody. Returns whether the task was still held.
    """
    if not task_queue.is_held(task):
        return False
    notify_provider_timeout(error, on_provider_timeout)
    return durably(lambda: task_queue.fail(task, code, str(error)))


def cap_of(cap: object) -> int:
    """The cap as a positive integer; raises ProviderConfigurationError for anything else, a row edited by hand included."""
    if type(cap) is not int or cap < 1:
        raise ProviderConfigurationError(f"max_in_flight must be a positive whole number, not {cap!r}", calls=0)
    return cap
