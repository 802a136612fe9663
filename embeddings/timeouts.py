"""The timeout contract: which errors are provider timeouts, and how the owner of a run hears of one.

One predicate and one notification serve every local provider kind (docs/architecture.md, Timeout contract). This module
is a leaf: it owns no circuit, knows none, and cannot invent a circuit's reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

PROVIDER_TIMEOUT = "PROVIDER_TIMEOUT"
OPENAI_COMPATIBLE_REQUEST_TIMEOUT = "OPENAI_COMPATIBLE_REQUEST_TIMEOUT"
ETIMEDOUT = "ETIMEDOUT"
ESOCKETTIMEDOUT = "ESOCKETTIMEDOUT"

PROVIDER_TIMEOUT_CODES = frozenset({PROVIDER_TIMEOUT, OPENAI_COMPATIBLE_REQUEST_TIMEOUT, ETIMEDOUT, ESOCKETTIMEDOUT})

OnProviderTimeout = Callable[[BaseException], None]


class ProviderTimeoutError(Exception):
    """A model server did not answer within its deadline. `code` is one of the four; `calls` counts HTTP requests."""

    def __init__(self, message: str, *, code: str = PROVIDER_TIMEOUT, calls: int = 1) -> None:
        super().__init__(message)
        self.code = code
        self.calls = calls


class OpenAICompatibleRequestTimeout(ProviderTimeoutError):
    """An OpenAI-compatible server did not answer one request within its total deadline."""

    def __init__(self, message: str, *, calls: int = 1) -> None:
        super().__init__(message, code=OPENAI_COMPATIBLE_REQUEST_TIMEOUT, calls=calls)


def is_provider_timeout(error: object) -> bool:
    """Whether the error carries exactly one of the four codes. Never raises.

    Deliberately no `isinstance(error, TimeoutError)`: database drivers and our own pools raise those.
    """
    try:
        code = getattr(error, "code", None)
    except Exception:  # A property that raises is no code, and the predicate never raises.
        return False
    return is_timeout_code(code)


def is_timeout_code(code: object) -> bool:
    """Whether this is exactly one of the four codes, as an error carries it or a row keeps it."""
    return type(code) is str and code in PROVIDER_TIMEOUT_CODES


def notify_provider_timeout(error: BaseException, on_provider_timeout: OnProviderTimeout | None) -> bool:
    """Calls the owner's callback now, synchronously, if the error is a provider timeout; says whether it was called.

    The caller still holds the slot, so nothing is dispatched until this returns. An exception of the callback never
    replaces the source error. If the callback raised before it opened its circuit, dispatch is not suppressed.
    """
    if on_provider_timeout is None or not is_provider_timeout(error):
        return False
    try:
        on_provider_timeout(error)
    except Exception as raised:
        # Whatever the owner's code raises, the source error stands and the slot must come free.
        logger.error("on_provider_timeout raised %s", type(raised).__name__)
    return True
