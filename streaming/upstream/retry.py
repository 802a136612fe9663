"""Whether a failed attempt is retried (docs/architecture.md, Chat).

Pure functions: an error is classified by its type and its machine codes, never by its text; the decision is data.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from embeddings.errors import causes
from embeddings.timeouts import ESOCKETTIMEDOUT, ETIMEDOUT
from streaming.upstream.errors import (
    ChatStreamError,
    EndState,
    ProviderFrameError,
    StreamCancelledError,
    StreamTruncatedError,
)

TRANSPORT_CODES = frozenset({"ECONNRESET", "ECONNREFUSED", "EPIPE", ETIMEDOUT, ESOCKETTIMEDOUT})
TRANSIENT_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# `code` or `type` of an error frame where the same request may succeed a moment later.
TRANSIENT_PROVIDER_CODES = frozenset(
    {
        "internal_server_error",
        "overloaded",
        "overloaded_error",
        "rate_limit_error",
        "rate_limit_exceeded",
        "server_error",
        "service_unavailable",
        "service_unavailable_error",
        "timeout",
        "unavailable_error",
    }
)
# Refusals that look transient by their status, and last until somebody pays or changes the request.
LASTING_PROVIDER_CODES = frozenset({"billing_hard_limit_reached", "insufficient_quota"})
MAX_RETRIES = 2


class RetryKind(StrEnum):
    """The cause of an error, as far as a retry depends on it."""

    ABORT = "abort"
    TRANSPORT = "transport"
    STATUS = "status"
    ERROR_FRAME = "error_frame"
    CONTENT = "content"
    NONE = "none"


@dataclass(frozen=True)
class RetryClassification:
    """`retryable`: another attempt might succeed. `decide_retry` decides whether there is one."""

    kind: RetryKind
    retryable: bool
    transport_code: str | None = None
    status: int | None = None
    retry_after_ms: int | None = None


NOTHING_TO_RETRY = RetryClassification(RetryKind.NONE, retryable=False)


@dataclass(frozen=True)
class RetryPolicy:
    """How many retries in all, and how long before each, in milliseconds."""

    max_retries: int = MAX_RETRIES
    base_delay_ms: int = 500
    max_delay_ms: int = 30_000


@dataclass(frozen=True)
class RetryDecision:
    """`counts_as` is the counter that a retry uses up: transport or content. `reason` is for the log."""

    retry: bool
    reason: str
    counts_as: RetryKind = RetryKind.NONE
    delay_ms: int = 0


def classify_retry_error(error: BaseException) -> RetryClassification:
    """An abort takes precedence, then a transport code of the error or its causes, then the error's own type and status."""
    if is_abort(error):
        return RetryClassification(RetryKind.ABORT, retryable=False)
    transport_code = first_transport_code(causes(error))
    if transport_code is not None:
        return RetryClassification(RetryKind.TRANSPORT, retryable=True, transport_code=transport_code)
    status, provider_code = _status_of(error), getattr(error, "provider_code", None)
    lasts = provider_code in LASTING_PROVIDER_CODES
    if isinstance(error, ProviderFrameError):
        transient = status in TRANSIENT_STATUSES or provider_code in TRANSIENT_PROVIDER_CODES
        return RetryClassification(RetryKind.ERROR_FRAME, retryable=transient and not lasts, status=status)
    if status is not None:
        retry_after_ms = getattr(error, "retry_after_ms", None)
        return RetryClassification(
            RetryKind.STATUS,
            retryable=status in TRANSIENT_STATUSES and not lasts,
            status=status,
            retry_after_ms=retry_after_ms if type(retry_after_ms) is int else None,
        )
    if isinstance(error, StreamTruncatedError):
        return RetryClassification(RetryKind.CONTENT, retryable=True)
    return RetryClassification(RetryKind.NONE, retryable=False)


def decide_retry(
    classification: RetryClassification,
    *,
    delivered: bool,
    transport_retries: int,
    content_retries: int,
    policy: RetryPolicy | None = None,
) -> RetryDecision:
    """Whether to try again, given the retries so far. An answer of which anything was delivered is never replayed."""
    policy = policy or RetryPolicy()
    made = transport_retries + content_retries
    if not classification.retryable:
        return RetryDecision(False, f"not_retryable_{classification.kind}")
    if delivered:
        return RetryDecision(False, "already_delivered")
    if made >= policy.max_retries:
        return RetryDecision(False, "retries_exhausted")
    wanted = classification.retry_after_ms
    if wanted is not None and wanted > policy.max_delay_ms:
        return RetryDecision(False, "retry_after_too_long")
    delay_ms = min(policy.base_delay_ms * 2**made, policy.max_delay_ms) if wanted is None else max(wanted, 0)
    counts_as = RetryKind.CONTENT if classification.kind is RetryKind.CONTENT else RetryKind.TRANSPORT
    return RetryDecision(True, f"retry_{classification.kind}", counts_as, delay_ms)


def end_of(error: BaseException | None) -> tuple[EndState, str]:
    """The end state and the error kind of an attempt that ended with this error; None is a complete answer.

    A plain asyncio cancellation is an interruption: a user's cancel has its own type.
    """
    if error is None:
        return EndState.COMPLETED, ""
    if isinstance(error, ChatStreamError):
        return error.end_state, error.error_kind
    if is_abort(error):
        return EndState.INTERRUPTED, "cancelled"
    return EndState.INTERRUPTED, "internal_error"


def is_abort(error: BaseException) -> bool:
    """Whether our side ended the call: the user cancelled, the task was cancelled, or the process shuts down."""
    return isinstance(
        error,
        StreamCancelledError
        | asyncio.CancelledError
        | concurrent.futures.CancelledError
        | GeneratorExit
        | KeyboardInterrupt
        | SystemExit,
    )


def first_transport_code(errors: Iterable[BaseException]) -> str | None:
    """The first code of the closed list that one of the errors carries, as `code` or as `errno`."""
    for cause in errors:
        code = getattr(cause, "code", None)
        if type(code) is str and code in TRANSPORT_CODES:
            return code
        number = getattr(cause, "errno", None)
        name = errno.errorcode.get(number) if type(number) is int else None
        if name in TRANSPORT_CODES:
            return name
    return None


def _status_of(error: BaseException) -> int | None:
    for name in ("status", "status_code"):
        status = getattr(error, name, None)
        if type(status) is int:
            return status
    return None
