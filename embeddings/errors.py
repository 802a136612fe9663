"""All of Sluicegate's errors, as one tree. Each has a machine code; no error is classified by its text.

Provider timeouts are defined in `embeddings.timeouts`: only they may open a circuit.
"""

from __future__ import annotations

from collections.abc import Iterator

_CAUSES_MAX = 50


class SluicegateError(Exception):
    """Base class of the errors that Sluicegate raises."""

    code: str = "SLUICEGATE_ERROR"


# --- requests that cannot be fulfilled -----------------------------------------------------------------------------
class UsageError(SluicegateError):
    """The request is wrong; the message says what is wrong and how to correct it."""

    code = "USAGE"


class DispatchNotAllowed(SluicegateError):
    """The run accepts no more embedding tasks: its circuit is open, or it was cancelled."""

    code = "DISPATCH_NOT_ALLOWED"


class TaskExpired(SluicegateError):
    """Interactive texts were not dispatched within their caller's timeout."""

    code = "EMBEDDING_QUEUE_EXPIRED"


class EmbeddingFailed(SluicegateError):
    """Interactive texts could not be embedded; `code` is the code of the failure."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class TaskRemoved(SluicegateError):
    """The embedding task was removed before it was embedded."""

    code = "EMBEDDING_TASK_REMOVED"


# --- the model server ----------------------------------------------------------------------------------------------
class ProviderError(SluicegateError):
    """A call to a model server failed, other than by a provider timeout.

    `status` is the HTTP status, if there was one; `calls` counts HTTP requests. The message is bounded and scrubbed.
    """

    code = "PROVIDER_ERROR"

    def __init__(self, message: str, *, status: int | None = None, calls: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.calls = calls


class ProviderConfigurationError(ProviderError):
    """The provider's configuration cannot work: its key variable is not set, or its cap is invalid."""

    code = "PROVIDER_CONFIGURATION"


class ProviderUnauthorized(ProviderError):
    """The provider refused the key (401, 403)."""

    code = "PROVIDER_UNAUTHORIZED"


class ProviderUnreachable(ProviderError):
    """The connection was refused, reset, or closed without a reply."""

    code = "PROVIDER_UNREACHABLE"


class KeptConnectionLost(ProviderUnreachable):
    """A kept-alive connection was closed just as it was used again, which says nothing about the server's health."""


class ProviderBusy(ProviderError):
    """The provider is busy (429, 503). `retry_after_ms` is its Retry-After, if it sent one."""

    code = "PROVIDER_BUSY"

    def __init__(self, message: str, *, status: int, retry_after_ms: int | None, calls: int = 1) -> None:
        super().__init__(message, status=status, calls=calls)
        self.retry_after_ms = retry_after_ms


class ModelNotLoaded(ProviderError):
    """The provider has not loaded the model, or is still loading it."""

    code = "PROVIDER_MODEL_NOT_LOADED"


class TextRefused(ProviderError):
    """A refusal that one text of the batch may have caused (400, 413, 422); its subclasses may be the server's own fault."""

    code = "PROVIDER_TEXT_REFUSED"


class ServerFailed(TextRefused):
    """A 500, which some servers return for a text that is too long."""

    code = "PROVIDER_SERVER_FAILED"


class ReplyNotFinite(TextRefused):
    """A 200 whose vectors contain NaN, infinity or null."""

    code = "PROVIDER_REPLY_NOT_FINITE"


class ReplyRefused(ProviderError):
    """A 200 whose vectors cannot be matched to the texts: wrong count, bad indices, empty, not an embedding reply."""

    code = "PROVIDER_REPLY_REFUSED"


class DimensionMismatch(ReplyRefused):
    """Vectors whose dimension differs from the generation's."""

    code = "PROVIDER_DIMENSION_MISMATCH"


class OwnTimeout(ProviderError):
    """A timeout of our own (connection pool, event loop), which says nothing about the provider."""

    code = "OWN_TIMEOUT"


class UnexpectedStatus(ProviderError):
    """Any other status than 200."""

    code = "PROVIDER_STATUS"


def causes(error: BaseException, *, with_contexts: bool = False) -> Iterator[BaseException]:
    """The error, its cause, the cause's cause, and so on; each once, even in a cycle.

    The members of an exception group count as its causes: each address of a host refuses for itself. `with_contexts`
    follows the context where there is no cause, for libraries that cut the chain with `from None`.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting and len(seen) < _CAUSES_MAX:
        cause = waiting.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            waiting.extend(reversed(cause.exceptions))
        behind = cause.__cause__ or (cause.__context__ if with_contexts else None)
        if behind is not None:
            waiting.append(behind)
