"""OpenAI-compatible servers (llama.cpp, vLLM, LM Studio, ...): `POST {base_url}/embeddings` through the openai SDK.

The transport's errors are translated here, at their own seam, into typed errors (docs/architecture.md, Timeout contract).
The SDK's retries are off: a retry of ours is a decision, counted and bounded (`providers.retries`).
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

import httpx2
import numpy as np
import openai

from embeddings.errors import ProviderError, TextRefused
from embeddings.providers.base import LIST_DEADLINE_S, EmbeddingCall, RawReply, api_key, scrubbed
from embeddings.providers.http import (
    HttpClient,
    of_transport,
    timeouts,
    watch_departure,
    within_deadline,
)
from embeddings.providers.http_base import retry_after_ms
from embeddings.providers.replies import bind, in_order, listed
from embeddings.providers.retries import Wordings, of_status, with_retries
from embeddings.timeouts import OpenAICompatibleRequestTimeout

if TYPE_CHECKING:
    from embeddings.models import Provider

# The error messages of llama.cpp and LM Studio for a model that is not loaded.
_NOT_LOADED_WORDS: Wordings = {
    400: (("Model was unloaded",), ("Failed to load model", "Operation canceled")),
    503: (("Loading model",),),
}


class OpenAICompatibleProvider:
    """One configured server; its client lives on the process's loop."""

    def __init__(self, provider: Provider) -> None:
        self._key = api_key(provider)
        self._key_name = provider.api_key_env
        self._http = HttpClient()
        self._client = openai.AsyncOpenAI(
            base_url=provider.base_url,
            api_key=self._key,
            max_retries=0,
            # The SDK would otherwise send the environment's organization and project to any address.
            default_headers=cast(
                "dict[str, str]", {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
            ),
            http_client=self._http,
        )
        self._format = _Format(refused=provider.refuses_base64)

    @property
    def refuses_base64(self) -> bool:
        """Whether this server has refused `encoding_format`, so that calls no longer send it."""
        return self._format.refused

    async def retire(self) -> None:
        await self._http.retire()

    async def embed(self, call: EmbeddingCall) -> RawReply:
        watch_departure(call)

        def is_about_the_format(error: Exception) -> bool:
            return isinstance(error, TextRefused) and call.may_test_format and self._format.doubted()

        reply = await with_retries(call, lambda: self._request(call), is_about_the_format)
        self._format.accepted()
        return reply

    def decode(self, reply: RawReply, expected: int, dimensions: int | None) -> np.ndarray:
        items = listed(reply.body, "data", self._key)
        return bind(in_order(items, expected), expected, dimensions)

    async def model_names(self) -> list[str]:
        body = await self._answer(self._get("/models"), LIST_DEADLINE_S)
        return [
            str(model["id"]) for model in listed(body, "data", self._key) if isinstance(model, dict) and "id" in model
        ]

    async def _request(self, call: EmbeddingCall) -> bytes:
        return await self._answer(self._post(call), call.deadline_s)

    async def _answer(self, request: Coroutine[Any, Any, bytes], deadline_s: float) -> bytes:
        try:
            return await within_deadline(request, deadline_s, OpenAICompatibleRequestTimeout)
        except openai.APIStatusError as error:
            raise self._of_status(error) from error
        except (openai.APIConnectionError, httpx2.RequestError) as error:
            raise of_transport(error, deadline_s, OpenAICompatibleRequestTimeout) from error

    async def _get(self, path: str) -> bytes:
        response = await self._client.get(path, cast_to=httpx2.Response, options={"timeout": timeouts(LIST_DEADLINE_S)})
        return response.content

    async def _post(self, call: EmbeddingCall) -> bytes:
        body: dict[str, Any] = {"model": call.model, "input": list(call.texts), **self._format.parameters()}
        response = await self._client.post(
            "/embeddings", body=body, cast_to=httpx2.Response, options={"timeout": timeouts(call.deadline_s)}
        )
        return response.content

    def _of_status(self, error: openai.APIStatusError) -> ProviderError:
        status = error.status_code
        said = scrubbed(_words(error), self._key)
        return of_status(status, said, self._key_name, retry_after_ms(error.response.headers), _NOT_LOADED_WORDS)


class _Format:
    """Whether the server accepts `encoding_format`. Base64 is preferred, since parsing floats costs more than sending them.

    A refusal before base64 was ever accepted may be about the format: a call that may test this is sent once more
    without it, and if that works, the format is never sent again.
    """

    def __init__(self, refused: bool) -> None:
        self.refused = refused
        self._settled = refused
        self._on_trial = False

    def parameters(self) -> dict[str, str]:
        return {} if self.refused or self._on_trial else {"encoding_format": "base64"}

    def accepted(self) -> None:
        self.refused = self.refused or self._on_trial
        self._settled, self._on_trial = True, False

    def doubted(self) -> bool:
        """A text was refused; True if the same call should be sent again without the format."""
        retry = not self._settled
        self._settled, self._on_trial = True, retry
        return retry


def _words(error: openai.APIStatusError) -> str:
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return str(body["message"])
    return error.response.text if body is None or isinstance(body, str) else json.dumps(body)
