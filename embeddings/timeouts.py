"""The timeout contract: which errors are provider timeouts, and how the owner of a run is notified of one.

One predicate and one notification serve every local provider kind (docs/architecture.md, Timeout contract). This module
imports nothing of Sluicegate: it knows no circuit, and cannot invent a circuit's reason.
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
    """Whether the error's code is exactly one of the four. Never raises.

    There is no `isinstance(error, TimeoutError)`, because database drivers and our own pools raise TimeoutError too.
    """
    try:
        code = getattr(error, "code", None)
    except Exception:  # `code` may be any property; one that raises is not one of the four codes.
        return False
    return is_timeout_code(code)


def is_timeout_code(code: object) -> bool:
    """Whether this is exactly one of the four codes, as an error carries it or a row keeps it."""
    return type(code) is str and code in PROVIDER_TIMEOUT_CODES


def notify_provider_timeout(error: BaseException, on_provider_timeout: OnProviderTimeout | None) -> bool:
    """Calls the owner's callback synchronously if the error is a provider timeout; returns whether it was called.

    The caller still holds the slot, so nothing is dispatched until this returns. An exception of the callback is logged
    and never replaces the source error. If the callback raised before it opened its circuit, dispatch goes on.
    """
    if on_provider_timeout is None or not is_provider_timeout(error):
        return False
    try:
        on_provider_timeout(error)
    except Exception as raised:
        # The callback may raise anything; the caller must still free its slot and report the source error.
        logger.error("on_provider_timeout raised %s", type(raised).__name__)
    return True
