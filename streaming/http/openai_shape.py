"""A turn in OpenAI's format: completion, common fields of the chunks, and the error of a failed turn (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from streaming import codes
from streaming.http.error_words import word_of
from streaming.upstream.retry import LASTING_PROVIDER_CODES

_PASSED_ON = frozenset({400, 413, 422, 429, 503})
_GATEWAY_TIMEOUT_KINDS = frozenset({"headers_timeout", "retrieval_timeout"})


@dataclass(frozen=True)
class Shape:
    """The fields common to every object of one turn."""

    turn: UUID
    model: str
    created_at: datetime

    @property
    def id(self) -> str:
        return f"chatcmpl-{self.turn.hex}"

    def chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk")

    def completion(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, sources: list[Any], fields: dict[str, Any]
    ) -> dict[str, Any]:
        """A whole `chat.completion`, with the provider's own fields.

        `sources` is our extension: the knowledge rows given to the model.
        """
        body = fields | self._head("chat.completion") | {"choices": choices, "usage": usage}
        return body | ({"sources": sources} if sources else {})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(self.created_at.timestamp()), "model": self.model}


@dataclass(frozen=True)
class OpenAIError:
    """An error in OpenAI's format, with its HTTP status and headers."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    retry_after_ms: int | None = None
    may_retry: bool = True

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.may_retry else {"x-should-retry": "false"}
        if self.retry_after_ms is not None:
            headers["retry-after"] = str(-(-self.retry_after_ms // 1000))
        return headers


def error_of(end: dict[str, Any], *, delivered: bool = False) -> OpenAIError:
    """The error for an end event other than completed. The client must not retry what was retried here already.

    `delivered`: whether the client has had some of the answer.
    """
    state, upstream = end["state"], end.get("status")
    status = _status_of(state, end["error_kind"], end["error_code"], upstream)
    message = end.get("message") or f"The answer ended as {state}."
    if status in (400, 413, 422):
        kind = "invalid_request_error"
    else:
        kind = {429: "rate_limit_error", 499: "cancelled", 504: "timeout_error"}.get(status, "api_error")
    return OpenAIError(
        status,
        message,
        kind,
        word_of(end, delivered=delivered),
        end.get("param") or None,
        retry_after_ms=end.get("retry_after_ms"),
        may_retry=status in (429, 503)
        and end["error_code"] != codes.NO_WORKER
        and end.get("provider_code") not in LASTING_PROVIDER_CODES,
    )


def _status_of(state: str, kind: str, code: str, upstream: int | None) -> int:
    if state in ("idle_timeout", "lifetime_exceeded") or kind in _GATEWAY_TIMEOUT_KINDS:
        return 504
    if state == "provider_error" and upstream in _PASSED_ON:
        return 400 if upstream == 422 else upstream
    if state == "cancelled":
        return 499
    if state == "interrupted":
        return 500 if code == codes.INTERNAL_ERROR else 503
    return 502
