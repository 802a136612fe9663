"""Sluicegate's error vocabulary, as one tree. Each error carries a machine code; nothing is classified by its text.

Provider timeouts stand apart, in `embeddings.timeouts`: they alone may open a circuit.
"""

from __future__ import annotations

from collections.abc import Iterator

_CAUSES_MAX = 50


class SluicegateError(Exception):
    """Base of everything Sluicegate raises on purpose."""

    code: str = "SLUICEGATE_ERROR"


# --- what a caller asked for cannot be done ------------------------------------------------------------------------
class UsageError(SluicegateError):
    """The request is wrong: the message names what, and what to do."""

    code = "USAGE"


class DispatchNotAllowed(SluicegateError):
    """The run takes no more embedding tasks: its circuit is open, or it was cancelled."""

    code = "DISPATCH_NOT_ALLOWED"


class TaskExpired(SluicegateError):
    """An interactive text was not embedded within its caller's patience."""

    code = "EMBEDDING_QUEUE_EXPIRED"


class EmbeddingFailed(SluicegateError):
    """An interactive text could not be embedded; `code` is the failure's own."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class TaskRemoved(SluicegateError):
    """The embedding task was removed before it was embedded."""

    code = "EMBEDDING_TASK_REMOVED"


# --- the model server ----------------------------------------------------------------------------------------------
class ProviderError(SluicegateError):
    """A call to a model server failed, other than by a provider timeout.

    `status` is the HTTP status where there was one; `detail` is bounded and scrubbed; `calls` counts HTTP requests.
    """

    code = "PROVIDER_ERROR"

    def __init__(self, message: str, *, status: int | None = None, calls: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.calls = calls


class ProviderConfigurationError(ProviderError):
    """The provider's configuration cannot work: a named key that is not set, a cap that makes no sense."""

    code = "PROVIDER_CONFIGURATION"


class ProviderUnauthorized(ProviderError):
    """The provider refused the key (401, 403)."""

    code = "PROVIDER_UNAUTHORIZED"


class ProviderUnreachable(ProviderError):
    """No connection: refused, reset, or closed without an answer."""

    code = "PROVIDER_UNREACHABLE"


class KeptConnectionLost(ProviderUnreachable):
    """A connection that an earlier request had left open was closed as it was used again: says nothing about the server."""


class ProviderBusy(ProviderError):
    """The provider asks for patience (429, 503). `retry_after_ms` is its own wish, where it said one."""

    code = "PROVIDER_BUSY"

    def __init__(self, message: str, *, status: int, retry_after_ms: int | None, calls: int = 1) -> None:
        super().__init__(message, status=status, calls=calls)
        self.retry_after_ms = retry_after_ms


class ModelNotLoaded(ProviderError):
    """The provider has not loaded the model, or is still loading it."""

    code = "PROVIDER_MODEL_NOT_LOADED"


class TextRefused(ProviderError):
    """A refusal that may be tied to one text of the batch (400, 413, 422; below: what may be the server's own fault)."""

    code = "PROVIDER_TEXT_REFUSED"


class ServerFailed(TextRefused):
    """A 500: some servers answer it to a text that is too long for them."""

    code = "PROVIDER_SERVER_FAILED"


class ReplyNotFinite(TextRefused):
    """A 200 whose vectors hold NaN, infinity or null."""

    code = "PROVIDER_REPLY_NOT_FINITE"


class ReplyRefused(ProviderError):
    """A 200 that cannot be bound to its texts: wrong count, bad indices, empty, not an embedding reply."""

    code = "PROVIDER_REPLY_REFUSED"


class DimensionMismatch(ReplyRefused):
    """Vectors of another dimension than the generation's."""

    code = "PROVIDER_DIMENSION_MISMATCH"


class OwnTimeout(ProviderError):
    """Our own waiting ran out (connection pool, loop): says nothing about the provider."""

    code = "OWN_TIMEOUT"


class UnexpectedStatus(ProviderError):
    """Any other answer than 200."""

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
