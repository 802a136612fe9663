"""The failure policy of embedding: what becomes of a task whose call failed (docs/architecture.md, Embedding, Poison).

A pure function of the facts; `drain` carries its decision out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from embeddings.errors import ProviderBusy, TextRefused


class Action(Enum):
    REQUEUE = auto()
    SPLIT = auto()
    SEND_CONTROL_TEXT = auto()
    MARK_UNDELIVERABLE = auto()
    FAIL = auto()


@dataclass(frozen=True)
class FailedCall:
    """The facts that a decision looks at.

    `texts`: how many were sent. `is_half`: the batch was split from a refused one. `is_late`: the reply was refused when its
    slot was free again, so that nothing can be sent in its place. `takes_other_texts`: whether the provider takes some other
    text of the same batch, or the control text; None while that is not known.
    """

    is_interactive: bool
    texts: int
    is_half: bool = False
    is_late: bool = False
    takes_other_texts: bool | None = None


def decide_failure(error: Exception, call: FailedCall) -> Action:
    """What to do about the call's final error. A timeout is never split, and an interactive text is its caller's to repeat.

    A text is marked undeliverable only once the provider has taken another: a wrong model name must not mark a whole
    knowledge base.
    """
    if call.is_interactive:
        return Action.FAIL
    if isinstance(error, ProviderBusy):
        return Action.REQUEUE
    if not isinstance(error, TextRefused):
        return Action.FAIL
    if call.texts > 1 and (call.is_late or not call.is_half):
        return Action.SPLIT
    if call.is_late:
        return Action.FAIL
    if call.takes_other_texts is None:
        return Action.SEND_CONTROL_TEXT
    if not call.takes_other_texts:
        return Action.FAIL
    return Action.SPLIT if call.texts > 1 else Action.MARK_UNDELIVERABLE
