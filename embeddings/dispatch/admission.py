"""Admission by kind of provider, as data: who may call the server next, who frees the slot, who hears of a timeout
(docs/architecture.md, Embedding and Timeout contract).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from embeddings.dispatch import task_queue
from embeddings.dispatch.task_queue import Dispatched, Order
from embeddings.errors import ProviderConfigurationError
from embeddings.states import ProviderKind
from embeddings.timeouts import OnProviderTimeout, notify_provider_timeout

if TYPE_CHECKING:
    from embeddings.models import Provider


@dataclass(frozen=True)
class AdmissionPolicy:
    """How one kind of provider is called.

    `cap`: from the provider's `max_in_flight`, re-read at each admission, to how many calls may be out cluster-wide; None for
    any number; may raise ProviderConfigurationError. `order`: among batches, `fair` takes the tenant least recently
    dispatched, and of it the outcome least recently dispatched, `fifo` the oldest task; interactive texts go first, but a
    batch overtaken for too long goes next.
    `slot_belongs_to_call`: a cancelled task's slot stays taken until its call has ended, and vectors that come late are stored;
    otherwise a cancel breaks the call off and frees the slot. `notifies`: a final timeout notifies the owner before the slot is
    free.
    """

    cap: Callable[[object], int | None]
    order: Order
    slot_belongs_to_call: bool
    notifies: bool

    def admit(self, provider: Provider) -> Dispatched | None:
        """Dispatches the next task if a slot is free. Raises ProviderConfigurationError where the cap makes no sense."""
        return task_queue.admit(provider.pk, self.cap, self.order)

    def settle_and_admit(self, task: Dispatched) -> tuple[bool, Dispatched | None]:
        """After a reply, in one transaction: frees the slot and dispatches the next task. First, whether the task was held."""
        return task_queue.settle_and_admit(task, self.cap, self.order)

    def likely_next(self, provider: Provider) -> int | None:
        """The id of the task that will most likely be dispatched next."""
        return task_queue.peek(provider.pk, self.order)

    def finish(
        self, task: Dispatched, error: Exception, code: str, on_provider_timeout: OnProviderTimeout | None
    ) -> bool:
        """The final failure of a task: its owner hears of a provider timeout first, and only then is the slot free.

        A holder whose lease was lost notifies nobody. Returns whether the task was still held.
        """
        if not task_queue.is_held(task):
            return False
        if self.notifies:
            notify_provider_timeout(error, on_provider_timeout)
        return task_queue.fail(task, code, str(error))


def _one(max_in_flight: object) -> int:
    """A lane is single-file whatever the row says."""
    return 1


def _positive(max_in_flight: object) -> int:
    """Refuses what is no positive integer, a row edited by hand included."""
    if type(max_in_flight) is not int or max_in_flight < 1:
        raise ProviderConfigurationError(
            f"max_in_flight must be a positive whole number, not {max_in_flight!r}", calls=0
        )
    return max_in_flight


def _any_number(max_in_flight: object) -> None:
    """A cap in the row means nothing."""


POLICIES: dict[ProviderKind, AdmissionPolicy] = {
    # The lane: one call at a time, tenants in turns, and each tenant's repositories.
    ProviderKind.OPENAI_COMPATIBLE: AdmissionPolicy(cap=_one, order="fair", slot_belongs_to_call=False, notifies=True),
    # Native Ollama: a cancelled caller hears at once, while the server goes on computing in its slot.
    ProviderKind.OLLAMA: AdmissionPolicy(cap=_positive, order="fifo", slot_belongs_to_call=True, notifies=True),
    # Gemini is remote and unqueued. Nothing holds other repositories back when one times out, so nobody is notified: the
    # guarantee of the queued kinds cannot be given (docs/decisions/0004-gemini.md).
    ProviderKind.GEMINI: AdmissionPolicy(cap=_any_number, order="fifo", slot_belongs_to_call=False, notifies=False),
}


def policy_for(provider: Provider) -> AdmissionPolicy:
    return POLICIES[ProviderKind(provider.kind)]
