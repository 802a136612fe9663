"""Native Ollama: `POST {base_url}/api/embed`. Its chat goes through its `/v1` (`streaming`), its queue is `admission`.

The transport's errors are translated here, at their own seam, into typed errors (docs/architecture.md, Timeout contract).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np

from embeddings.errors import ProviderError, ReplyRefused
from embeddings.providers.base import LIST_DEADLINE_S, EmbeddingCall, RawReply, api_key, bearer, scrubbed
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
from embeddings.providers.retries import Wordings, of_status, with_retries
from embeddings.timeouts import ProviderTimeoutError

if TYPE_CHECKING:
    from embeddings.models import Provider

# Ollama's error messages for a model that could not be loaded.
_NOT_LOADED_WORDS: Wordings = {
    500: (("model failed to load",), ("llama runner process has terminated",)),
}


class OllamaProvider:
    """One configured server; its client lives on the process's loop."""

    # Vectors come as floats: there is no format to refuse.
    refuses_base64 = False

    def __init__(self, provider: Provider) -> None:
        self._base_url = provider.base_url
        self._key = api_key(provider)
        self._key_name = provider.api_key_env
        self._client = HttpClient()

    async def retire(self) -> None:
        await self._client.retire()

    async def embed(self, call: EmbeddingCall) -> RawReply:
        watch_departure(call)
        return await with_retries(call, lambda: self._request(call))

    def decode(self, reply: RawReply, expected: int, dimensions: int | None) -> np.ndarray:
        return bind(listed(reply.body, "embeddings", self._key), expected, dimensions)

    async def version(self) -> str:
        """The server's own version. Raises as `embed` does."""
        return str((await self._get("/api/version")).get("version", ""))

    async def model_names(self) -> list[str]:
        """The models that the server has pulled."""
        models = (await self._get("/api/tags")).get("models")
        if not isinstance(models, list):
            raise ReplyRefused("/api/tags answered no list of models")
        return [str(model["name"]) for model in models if isinstance(model, dict) and "name" in model]

    async def _request(self, call: EmbeddingCall) -> bytes:
        # Without this, Ollama embeds only the start of a text that is too long, and reports no error.
        body = {"model": call.model, "input": list(call.texts), "truncate": False}
        posted = post_json(self._client, f"{self._base_url}/api/embed", body, bearer(self._key), call.deadline_s)
        try:
            response = await within_deadline(posted, call.deadline_s, ProviderTimeoutError)
        except httpx2.RequestError as error:
            raise of_transport(error, call.deadline_s, ProviderTimeoutError) from error
        if response.status_code != httpx2.codes.OK:
            raise self._of_status(response)
        return response.content

    async def _get(self, path: str) -> dict[str, Any]:
        got = self._client.get(f"{self._base_url}{path}", headers=bearer(self._key), timeout=timeouts(LIST_DEADLINE_S))
        try:
            response = await within_deadline(got, LIST_DEADLINE_S, ProviderTimeoutError)
        except httpx2.RequestError as error:
            raise of_transport(error, LIST_DEADLINE_S, ProviderTimeoutError) from error
        if response.status_code != httpx2.codes.OK:
            raise self._of_status(response)
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ReplyRefused(f"{path} answered something other than a JSON object")
        return answer

    def _of_status(self, response: httpx2.Response) -> ProviderError:
        status = response.status_code
        said = scrubbed(_words(response), self._key)
        return of_status(status, said, self._key_name, retry_after_ms(response.headers), _NOT_LOADED_WORDS)


def _words(response: httpx2.Response) -> str:
    """The message of Ollama's `{"error": "..."}`, or the whole body, which a proxy may have sent."""
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        return response.text
    return body["error"] if isinstance(body, dict) and isinstance(body.get("error"), str) else response.text
