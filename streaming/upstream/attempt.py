"""What goes into one attempt of a chat turn, and what comes out of it (docs/architecture.md, Chat). Pure data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from streaming.upstream.budgets import ChatBudgets
from streaming.upstream.errors import EndState
from streaming.upstream.retry import RetryClassification


@dataclass(frozen=True)
class ProviderConfig:
    """How to reach one provider. `provider_id` names it across attempts: its client is kept and reused.

    `lenient` accepts answers whose stream ends with `[DONE]` but no finish reason.
    """

    provider_id: Hashable
    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    budgets: ChatBudgets = field(default_factory=ChatBudgets)
    lenient: bool = False


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended, and what came until then. Times of waiting are milliseconds of waiting for upstream.

    `error` is None exactly if the answer is complete. `detail` is fit for people: bounded, scrubbed, without answer text.
    `first_content_ms` and `waited_ms` do not contain the consumer's own time.
    """

    end_state: EndState
    error_kind: str
    error: BaseException | None
    classification: RetryClassification
    delivered: bool
    chunks: int
    bytes: int
    comments: int
    finish_reasons: Mapping[int, str]
    usage: Mapping[str, Any] | None
    started_at: datetime
    ended_at: datetime
    first_content_at: datetime | None
    first_content_ms: int | None
    longest_gap_ms: int
    waited_ms: int

    @property
    def error_code(self) -> str:
        """The error's machine code; empty for a complete answer."""
        return "" if self.error is None else str(getattr(self.error, "code", type(self.error).__name__))

    @property
    def transport_code(self) -> str | None:
        return self.classification.transport_code

    @property
    def status(self) -> int | None:
        """The provider's HTTP status, from its reply or from an error frame."""
        return self.classification.status

    @property
    def detail(self) -> str:
        return "" if self.error is None else str(self.error)
