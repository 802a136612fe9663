"""Gemini: `POST {base_url}/models/{model}:batchEmbedContents`, Google's own REST interface (docs/decisions/0004-gemini.md).

A remote service, unqueued and uncapped: this kind makes no queued-provider guarantee. Several repositories may be in
flight when one of them times out; the timeout notifies no owner and opens no circuit, and each outcome is decided alone.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2
import numpy as np

from embeddings.errors import (
    ProviderBusy,
    ProviderConfigurationError,
    ProviderError,
    ProviderUnauthorized,
    ReplyRefused,
)
from embeddings.providers.base import LIST_DEADLINE_S, NO_KEY, EmbeddingCall, RawReply, api_key, scrubbed
from embeddings.providers.http import (
    HttpClient,
    of_transport,
    post_json,
    timeouts,
    watch_departure,
    within_deadline,
)
from embeddings.providers.http_base import retry_after_ms
from embeddings.providers.replies import bind, listed
from embeddings.providers.retries import of_status, with_retries
from embeddings.timeouts import ProviderTimeoutError

if TYPE_CHECKING:
    from embeddings.models import Provider

# The service's own limit on one request.
TEXTS_MAX = 100
# A wrong key is a 400 here. The reason code in the error's details distinguishes it from a refused text.
_KEY_REASONS = frozenset({"API_KEY_INVALID", "API_KEY_SERVICE_BLOCKED"})


class GeminiProvider:
    """One configured project of Google's; its client lives on the process's loop."""

    # Vectors come as floats: there is no format to refuse.
    refuses_base64 = False

    def __init__(self, provider: Provider) -> None:
        self._base_url = provider.base_url
        self._key = api_key(provider)
        self._key_name = provider.api_key_env
        if self._key == NO_KEY:
            raise ProviderConfigurationError(
                f"provider {provider.name} needs a key: name its variable with --api-key-env", calls=0
            )
        self._client = HttpClient()

    async def retire(self) -> None:
        await self._client.retire()

    async def embed(self, call: EmbeddingCall) -> RawReply:
        """Sends at most `TEXTS_MAX` texts a request, one after another; the reply's body is the list of their bodies."""
        watch_departure(call)
        bodies: list[bytes] = []
        calls = 0
        for start in range(0, len(call.texts), TEXTS_MAX):
            try:
                texts = call.texts[start : start + TEXTS_MAX]
                reply = await with_retries(call, partial(self._request, call, texts))
            except (ProviderError, ProviderTimeoutError) as error:
                error.calls += calls
                raise
            bodies.append(reply.body)
            calls += reply.calls
        return RawReply(b"[" + b",".join(bodies) + b"]", calls)

    async def model_names(self) -> list[str]:
        """The models of the service's first page, which holds a thousand."""
        url, headers = f"{self._base_url}/models?pageSize=1000", {"x-goog-api-key": self._key}
        got = self._client.get(url, headers=headers, timeout=timeouts(LIST_DEADLINE_S))
        models = listed(await self._answer(got, LIST_DEADLINE_S), "models", self._key)
        return [str(model["name"]) for model in models if isinstance(model, dict) and "name" in model]

    def decode(self, reply: RawReply, expected: int, dimensions: int | None) -> np.ndarray:
        vectors: list[Any] = []
        for part in listed(reply.body, None, self._key):
            items = part.get("embeddings") if isinstance(part, dict) else None
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise ReplyRefused("not an embedding reply: it has no list of embeddings")
            vectors += [item.get("values") for item in items]
        return bind(vectors, expected, dimensions)

    async def _request(self, call: EmbeddingCall, texts: Sequence[str]) -> bytes:
        model = call.model.removeprefix("models/")
        # Each text is a content of its own: parts of one content would come back fused into one vector.
        requests = [{"model": f"models/{model}", "content": {"parts": [{"text": text}]}} for text in texts]
        url = f"{self._base_url}/models/{quote(model, safe='')}:batchEmbedContents"
        posted = post_json(self._client, url, {"requests": requests}, {"x-goog-api-key": self._key}, call.deadline_s)
        return await self._answer(posted, call.deadline_s)

    async def _answer(self, request: Coroutine[Any, Any, httpx2.Response], deadline_s: float) -> bytes:
        try:
            response = await within_deadline(request, deadline_s, ProviderTimeoutError)
        except httpx2.RequestError as error:
            raise of_transport(error, deadline_s, ProviderTimeoutError) from error
        if response.status_code != httpx2.codes.OK:
            raise self._of_status(response)
        return response.content

    def _of_status(self, response: httpx2.Response) -> ProviderError:
        error = _error(response)
        said = scrubbed(str(error.get("message") or response.text), self._key)
        details = _details(error)
        if any(str(detail.get("reason")) in _KEY_REASONS for detail in details):
            return ProviderUnauthorized(
                f"the provider answered {response.status_code}: {said} (its key comes from {self._key_name})",
                status=response.status_code,
            )
        refused = of_status(response.status_code, said, self._key_name, retry_after_ms(response.headers))
        if isinstance(refused, ProviderBusy) and refused.retry_after_ms is None:
            refused.retry_after_ms = _retry_delay_ms(details)
        return refused


def _error(response: httpx2.Response) -> dict[str, Any]:
    """The `error` of Google's `{"error": {"code", "message", "status", "details"}}`; empty for any other reply."""
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        return {}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    details = error.get("details")
    return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []


def _retry_delay_ms(details: Sequence[dict[str, Any]]) -> int | None:
    """The delay that Google asks for in the body, such as `"retryDelay": "34s"`."""
    for detail in details:
        delay = detail.get("retryDelay")
        if isinstance(delay, str) and delay.endswith("s"):
            try:
                return max(0, int(float(delay[:-1]) * 1000))
            except (ValueError, OverflowError):
                continue
    return None
