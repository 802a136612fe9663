"""The codes of errors under /v1, listed in docs/errors.md: the provider's own, or a word of ours (pure).

No errno names: some clients take ETIMEDOUT or ECONNRESET for a fault of their own connection, and send the request
again after its answer was delivered, without end (docs/architecture.md, Chat).
"""

from __future__ import annotations

from typing import Any

from embeddings.timeouts import is_timeout_code
from streaming import codes
from streaming.states import TurnState
from streaming.upstream.retry import TRANSIENT_PROVIDER_CODES, TRANSPORT_CODES

PROVIDER_ERROR = "provider_error"
PROVIDER_TIMEOUT = "provider_timeout"
BY_CODE = {
    codes.NO_WORKER: "no_worker",
    codes.WORKER_LOST: "worker_lost",
    codes.WORKER_SHUT_DOWN: "worker_shut_down",
    codes.TURN_WALL: "turn_time_exceeded",
    codes.INTERNAL_ERROR: "internal_error",
}
BY_KIND = {
    "headers_timeout": PROVIDER_TIMEOUT,
    "connection_timeout": PROVIDER_TIMEOUT,
    "retrieval_timeout": "retrieval_timeout",
    "retrieval": "retrieval_failed",
    "connection_reset": "provider_disconnected",
    "disconnected": "provider_disconnected",
}
BY_STATE = {
    TurnState.TRUNCATED: "stream_truncated",
    TurnState.IDLE_TIMEOUT: "stream_idle_timeout",
    TurnState.LIFETIME_EXCEEDED: "stream_lifetime_exceeded",
    TurnState.PROVIDER_ERROR: PROVIDER_ERROR,
    TurnState.PROTOCOL_ERROR: "provider_protocol_error",
    TurnState.TRANSPORT_ERROR: "provider_unreachable",
    TurnState.CANCELLED: "cancelled",
    TurnState.INTERRUPTED: "interrupted",
}


def word_of(end: dict[str, Any], *, delivered: bool) -> str:
    """The code of a failed turn's error. `delivered`: whether the client has had some of the answer.

    A provider's code that calls for another attempt is not passed on after that: the client would repeat the answer.
    """
    named = end.get("provider_code") or ""
    if end["state"] == TurnState.PROVIDER_ERROR and named and named not in TRANSPORT_CODES:
        return PROVIDER_ERROR if delivered and named in TRANSIENT_PROVIDER_CODES else str(named)
    found = BY_CODE.get(end["error_code"]) or BY_KIND.get(end["error_kind"])
    return found or BY_STATE.get(end["state"], PROVIDER_ERROR)


def without_errno(code: str) -> str:
    """The code of an error of the embedding lane, as it is shown under /v1."""
    return PROVIDER_TIMEOUT if code in TRANSPORT_CODES or is_timeout_code(code) else code
