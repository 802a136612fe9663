"""Retries within one embedding task, the same for every provider kind, counted and bounded (docs/architecture.md).

Only the failure that remains after them is the task's own, and only that one may be a final provider timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from embeddings.errors import (
    KeptConnectionLost,
    ModelNotLoaded,
    ProviderBusy,
    ProviderError,
    ProviderUnauthorized,
    ServerFailed,
    TextRefused,
    UnexpectedStatus,
)
from embeddings.providers.base import EmbeddingCall, RawReply
from embeddings.providers.http import KEPT_CONNECTIONS
from embeddings.timeouts import ProviderTimeoutError, is_provider_timeout

MODEL_LOAD_RETRIES, MODEL_LOAD_PAUSE_S = 3, 0.5
CONTENTION_RETRIES, CONTENTION_PAUSE_S = 2, 1.0
CONTENTION_STATUS = frozenset({408, 429, 503, 504})
TEXT_STATUS = frozenset({400, 413, 422})
# Messages for a model that is not loaded, by status: all words of one row must occur.
Wordings = Mapping[int, Sequence[Sequence[str]]]


async def with_retries(
    call: EmbeddingCall,
    send: Callable[[], Awaitable[bytes]],
    again_at_once: Callable[[Exception], bool] = lambda error: False,
) -> RawReply:
    """Sends until there is a reply or a final failure; both carry the number of HTTP requests."""
    calls = loads = contentions = lost = 0
    while True:
        calls += 1
        try:
            return RawReply(await send(), calls)
        except (ProviderError, ProviderTimeoutError) as error:
            error.calls = calls
            if isinstance(error, KeptConnectionLost) and lost < KEPT_CONNECTIONS:
                lost += 1
                continue
            if again_at_once(error):
                continue
            pause_s = retry_pause_s(error, call.is_interactive, loads, contentions)
            if pause_s is None:
                raise
            loads += isinstance(error, ModelNotLoaded)
            contentions += not isinstance(error, ModelNotLoaded)
        await asyncio.sleep(pause_s)


def retry_pause_s(error: Exception, is_interactive: bool, loads: int, contentions: int) -> float | None:
    """How long to wait before the call is tried again within its task; None: the failure is final."""
    if isinstance(error, ModelNotLoaded):
        return MODEL_LOAD_PAUSE_S if loads < MODEL_LOAD_RETRIES else None
    contended = is_provider_timeout(error) or getattr(error, "status", None) in CONTENTION_STATUS
    if is_interactive and contended and contentions < CONTENTION_RETRIES:
        return CONTENTION_PAUSE_S
    return None


def of_status(
    status: int, said: str, key_name: str, retry_after_ms: int | None, not_loaded: Wordings | None = None
) -> ProviderError:
    """The typed error of a status other than 200; `said` is scrubbed and bounded.

    The status alone decides, except for kinds that load models on demand: a 404, or the words in their table
    `not_loaded`, mean that the model is not loaded.
    """
    message = f"the provider answered {status}: {said}" if said else f"the provider answered {status}"
    if not_loaded is not None:
        rows = not_loaded.get(status, ())
        if status == 404 or any(all(word in said for word in words) for words in rows):
            return ModelNotLoaded(message, status=status)
    if status in (401, 403):
        variable = key_name or "no variable: set --api-key-env"
        return ProviderUnauthorized(f"{message} (its key comes from {variable})", status=status)
    if status in (429, 503):
        return ProviderBusy(message, status=status, retry_after_ms=retry_after_ms)
    if status in TEXT_STATUS:
        return TextRefused(message, status=status)
    if status == 500:
        return ServerFailed(message, status=status)
    return UnexpectedStatus(message, status=status)
