"""The time budgets of a chat call: resolved once, nonsense refused by name (docs/architecture.md, Chat).

Pure. All values are integer milliseconds; 0 means that the budget is disabled.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

DEFAULT_IDLE_TIMEOUT_MS = 120_000
DEFAULT_LIFETIME_MS = 900_000
DEFAULT_TURN_WALL_MS = 3_600_000
DEFAULT_FINISH_GRACE_MS = 10_000
LARGEST_BUDGET_MS = 2**31 - 1


class InvalidBudgetError(ValueError):
    """The named budget is not an integer number of milliseconds of at most 2^31 - 1."""

    code: ClassVar[str] = "INVALID_BUDGET"

    def __init__(self, name: str, value: object) -> None:
        # repr() of an integer of thousands of digits raises, and a configuration value may be of any length.
        shown = "a larger one" if type(value) is int else repr(value)[:100]
        super().__init__(f"{name} must be an integer of at most {LARGEST_BUDGET_MS} milliseconds, not {shown}")
        self.name = name


@dataclass(frozen=True)
class ChatBudgets:
    """The effective budgets of one chat call, in milliseconds; 0 is disabled."""

    request_timeout_ms: int = DEFAULT_IDLE_TIMEOUT_MS
    stream_first_content_timeout_ms: int = DEFAULT_IDLE_TIMEOUT_MS
    stream_idle_timeout_ms: int = DEFAULT_IDLE_TIMEOUT_MS
    stream_keepalive_timeout_ms: int = DEFAULT_IDLE_TIMEOUT_MS
    stream_lifetime_ms: int = DEFAULT_LIFETIME_MS
    turn_wall_ms: int = DEFAULT_TURN_WALL_MS
    finish_grace_ms: int = DEFAULT_FINISH_GRACE_MS

    def describe(self) -> str:
        """Every effective value, for the log line when a call starts: `request_timeout_ms=120000 ... =off`."""
        return " ".join(f"{field.name}={getattr(self, field.name) or 'off'}" for field in fields(self))


def resolve_budgets(
    *,
    request_timeout_ms: object = None,
    stream_first_content_timeout_ms: object = None,
    stream_idle_timeout_ms: object = None,
    stream_keepalive_timeout_ms: object = None,
    stream_lifetime_ms: object = None,
    turn_wall_ms: object = None,
    finish_grace_ms: object = None,
) -> ChatBudgets:
    """The effective budgets of a configuration in which any value may be unset (None).

    An unset budget takes the idle budget's value and is disabled with it; the lifetime, the turn's wall clock and the
    grace after the finish have defaults of their own. `<= 0` disables. Raises InvalidBudgetError, naming the budget.
    """
    idle = _budget("stream_idle_timeout_ms", stream_idle_timeout_ms, DEFAULT_IDLE_TIMEOUT_MS)
    return ChatBudgets(
        request_timeout_ms=_budget("request_timeout_ms", request_timeout_ms, idle),
        stream_first_content_timeout_ms=_budget(
            "stream_first_content_timeout_ms", stream_first_content_timeout_ms, idle
        ),
        stream_idle_timeout_ms=idle,
        stream_keepalive_timeout_ms=_budget("stream_keepalive_timeout_ms", stream_keepalive_timeout_ms, idle),
        stream_lifetime_ms=_budget("stream_lifetime_ms", stream_lifetime_ms, DEFAULT_LIFETIME_MS),
        turn_wall_ms=_budget("turn_wall_ms", turn_wall_ms, DEFAULT_TURN_WALL_MS),
        finish_grace_ms=_budget("finish_grace_ms", finish_grace_ms, DEFAULT_FINISH_GRACE_MS),
    )


def validated_budget(name: str, value: object) -> int:
    """The value as an integer, 0 where it disables. Raises InvalidBudgetError for anything else than an integer."""
    if type(value) is not int or value > LARGEST_BUDGET_MS:
        raise InvalidBudgetError(name, value)
    return max(value, 0)


def _budget(name: str, value: object, unset: int) -> int:
    return unset if value is None else validated_budget(name, value)
