"""Gemini's lack of a gate: a remote service, unqueued and uncapped (docs/decisions/0004-gemini.md).

Tasks are durable here too, but nothing stands between them and the provider: whoever drains dispatches. There is no
`finish`, so that nobody is ever notified of a timeout: another repository may be in flight already when the first one
times out, and the guarantee of the queued local providers cannot be claimed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched

if TYPE_CHECKING:
    from embeddings.models import Provider

cancels_calls = True
keeps_late_replies = False
finish = None


def admit(provider: Provider) -> Dispatched | None:
    """Dispatches the next task, however many are out."""
    return task_queue.admit(provider.pk, _uncapped, "fifo")


def settle_and_admit(provider: Provider, task: Dispatched) -> tuple[bool, Dispatched | None]:
    """After a reply: dispatches the next task in the same transaction; says whether the reply counts."""
    return task_queue.settle_and_admit(task, _uncapped, "fifo")


def likely_next(provider: Provider) -> int | None:
    """The task that will most likely be dispatched next."""
    return task_queue.peek(provider.pk, "fifo")


def _uncapped(cap: object) -> None:
    """A cap in the row means nothing here."""
