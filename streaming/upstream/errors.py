"""The error vocabulary of a chat stream, as one tree (docs/architecture.md, Chat).

Each error carries a machine `code`, and the end state and error kind that its attempt ends with. Nothing is ever
classified by its text. Only the budgets' own errors and real transport errors carry a transport code as their `code`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from embeddings.timeouts import ETIMEDOUT


class EndState(StrEnum):
    """How an attempt, and with its last attempt a turn, ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    IDLE_TIMEOUT = "idle_timeout"
    LIFETIME_EXCEEDED = "lifetime_exceeded"
    PROVIDER_ERROR = "provider_error"
    PROTOCOL_ERROR = "protocol_error"
    TRANSPORT_ERROR = "transport_error"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


class ChatStreamError(Exception):
    """Base of every error that ends an attempt."""

    code: str = "CHAT_STREAM_ERROR"
    end_state: ClassVar[EndState] = EndState.INTERRUPTED
    error_kind: str = ""


class StreamCancelledError(ChatStreamError):
    """The user cancelled; this takes precedence over any other error."""

    code = "STREAM_CANCELLED"
    end_state = EndState.CANCELLED
    error_kind = "user"

    def __init__(self) -> None:
        super().__init__("the user cancelled the stream")


# --- a budget ran out ----------------------------------------------------------------------------------------------
class StreamTimeoutError(ChatStreamError):
    """A budget of one attempt ran out. Times are milliseconds of waiting for upstream, without the consumer's."""

    def __init__(self, message: str, *, budget_ms: int, chunks: int, bytes_received: int, lifetime_ms: int) -> None:
        super().__init__(f"{message} ({chunks} chunks, {bytes_received} bytes, {lifetime_ms} ms of waiting in all)")
        self.budget_ms = budget_ms
        self.chunks_received = chunks
        self.bytes_received = bytes_received
        self.stream_lifetime_ms = lifetime_ms


class StreamRequestTimeoutError(StreamTimeoutError):
    """No connection, no headers, or no complete error body within the request budget."""

    code = ETIMEDOUT
    end_state = EndState.TRANSPORT_ERROR
    error_kind = "headers_timeout"


class StreamInactivityTimeoutError(StreamTimeoutError):
    """The stream made no progress for `idle_ms`.

    `kind` is what it did instead: `silent` (no byte), `keepalive` (bytes, but no chunk) or `empty_chunks` (chunks,
    but no content, before the first content).
    """

    code = ETIMEDOUT
    end_state = EndState.IDLE_TIMEOUT

    def __init__(
        self, message: str, *, kind: str, budget_ms: int, chunks: int, bytes_received: int, lifetime_ms: int
    ) -> None:
        super().__init__(
            message, budget_ms=budget_ms, chunks=chunks, bytes_received=bytes_received, lifetime_ms=lifetime_ms
        )
        self.idle_ms = budget_ms
        self.kind = kind
        self.error_kind = kind


class StreamLifetimeExceededError(StreamTimeoutError):
    """An attempt waited for upstream for longer than its lifetime budget, without ever falling silent."""

    code = "STREAM_LIFETIME_EXCEEDED"
    end_state = EndState.LIFETIME_EXCEEDED
    error_kind = "attempt"


class FinishGraceElapsedError(StreamTimeoutError):
    """The answer has finished, and nothing followed within the grace period: an end, not a failure."""

    code = "STREAM_FINISH_GRACE_ELAPSED"
    end_state = EndState.COMPLETED
    error_kind = ""


# --- the provider's reply --------------------------------------------------------------------------------------------
class ProviderStatusError(ChatStreamError):
    """The provider answered with an error status.

    `detail` is bounded and scrubbed; `provider_code` and `param` are the provider's own words, where it named them.
    """

    code = "PROVIDER_STATUS"
    end_state = EndState.PROVIDER_ERROR
    error_kind = "status"

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        provider_code: str | None = None,
        param: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(f"the provider answered {status}: {detail}" if detail else f"the provider answered {status}")
        self.status = status
        self.detail = detail
        self.provider_code = provider_code
        self.param = param
        self.retry_after_ms = retry_after_ms


class ProviderFrameError(ChatStreamError):
    """The provider reported an error inside its stream, after a 200. `status` is set where the frame names one."""

    code = "PROVIDER_ERROR_FRAME"
    end_state = EndState.PROVIDER_ERROR
    error_kind = "error_frame"

    def __init__(
        self, detail: str, *, provider_code: str | None = None, param: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(f"the provider reported an error in its stream: {detail}")
        self.detail = detail
        self.provider_code = provider_code
        self.param = param
        self.status = status


class ProtocolError(ChatStreamError):
    """A 200 that is not a chat stream: another content type, malformed JSON, invalid UTF-8, an endless line."""

    code = "PROTOCOL_ERROR"
    end_state = EndState.PROTOCOL_ERROR

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.error_kind = kind
        self.detail = detail


class TransportError(ChatStreamError):
    """The connection failed. `transport_code` is an errno name of the closed list, or None where none applies."""

    code = "TRANSPORT_ERROR"
    end_state = EndState.TRANSPORT_ERROR

    def __init__(self, kind: str, detail: str, *, transport_code: str | None = None) -> None:
        super().__init__(detail)
        self.error_kind = kind
        self.transport_code = transport_code
        self.detail = detail
        if transport_code is not None:
            self.code = transport_code


class StreamTruncatedError(ChatStreamError):
    """The stream ended by itself, but without saying that it had finished.

    `kind` is `no_finish_reason`, `no_content` (chunks, none with content), `no_chunks` or `incomplete_event`.
    """

    code = "STREAM_TRUNCATED"
    end_state = EndState.TRUNCATED

    def __init__(self, kind: str) -> None:
        super().__init__(f"the stream ended early: {kind}")
        self.error_kind = kind
