"""Which gate admits a provider's tasks, by its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from embeddings.dispatch import admission, lane, unqueued
from embeddings.dispatch.task_queue import Dispatched
from embeddings.states import ProviderKind
from embeddings.timeouts import OnProviderTimeout

if TYPE_CHECKING:
    from embeddings.models import Provider


class Finish(Protocol):
    """The final failure of a task: notify its owner, then free its slot."""

    def __call__(
        self, task: Dispatched, error: Exception, code: str, on_provider_timeout: OnProviderTimeout | None
    ) -> bool: ...


class Gate(Protocol):
    """Who may call the model server next, and what a task's end does to its slot."""

    # Whether a removed task's call is broken off at once, and whether a reply that comes after the removal is kept.
    cancels_calls: bool
    keeps_late_replies: bool

    @property
    def finish(self) -> Finish | None:
        """None where there is no queue to hold back: nobody is notified then."""
        ...

    def admit(self, provider: Provider) -> Dispatched | None: ...
    def settle_and_admit(self, provider: Provider, task: Dispatched) -> tuple[bool, Dispatched | None]: ...
    def likely_next(self, provider: Provider) -> int | None: ...


_GATES: dict[ProviderKind, Gate] = {
    ProviderKind.OPENAI_COMPATIBLE: lane,
    ProviderKind.OLLAMA: admission,
    ProviderKind.GEMINI: unqueued,
}


def gate_for(provider: Provider) -> Gate:
    return _GATES[ProviderKind(provider.kind)]
