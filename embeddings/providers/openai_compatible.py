"""OpenAI-compatible servers (llama.cpp, vLLM, LM Studio, ...): `POST {base_url}/embeddings` through the openai SDK.

The transport's errors are translated here, at their own seam, into typed errors (docs/architecture.md, Timeout contract).
The SDK's retries are off: a retry of ours is a decision, counted and bounded by `_retry_pause_s`.
"""

from __future__ import annotations

import asyncio
import errno
import json
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import httpx2
import numpy as np
import openai

from embeddings.errors import (
    ModelNotLoaded,
    OwnTimeout,
    ProviderBusy,
    ProviderError,
    ProviderUnauthorized,
    ProviderUnreachable,
    ReplyRefused,
    TextRefused,
    UnexpectedStatus,
)
from embeddings.providers.base import EmbeddingCall, RawReply, api_key, scrubbed
from embeddings.providers.replies import bind, in_order
from embeddings.timeouts import ETIMEDOUT, OpenAICompatibleRequestTimeout, ProviderTimeoutError, is_provider_timeout

if TYPE_CHECKING:
    from embeddings.models import Provider

REPLY_BYTES_MAX = 256 * 1024 * 1024
MODEL_LOAD_RETRIES, MODEL_LOAD_PAUSE_S = 3, 0.5
CONTENTION_RETRIES, CONTENTION_PAUSE_S = 2, 1.0
CONNECT_TIMEOUT_S = 10.0
# A deadline that fires this late was not reached by the server's silence but by a loop of ours that stood still.
LOOP_LAG_MAX_S = 1.0
_CONTENTION_STATUS = frozenset({408, 429, 503, 504})
_TEXT_STATUS = frozenset({400, 413, 422, 500})
# The server wordings that say a model is not loaded, by status; all words of a row must be there.
_NOT_LOADED_WORDS: dict[int, tuple[tuple[str, ...], ...]] = {
    400: (("Model was unloaded",), ("Failed to load model", "Operation canceled")),
    503: (("Loading model",),),
}

_left: ContextVar[Event | None] = ContextVar("left", default=None)


class OpenAICompatibleProvider:
    """One configured server; its client lives on the process's loop."""

    def __init__(self, provider: Provider) -> None:
        self._key = api_key(provider)
        self._key_name = provider.api_key_env
        self._client = openai.AsyncOpenAI(
            base_url=provider.base_url,
            api_key=self._key,
            max_retries=0,
            # The SDK would otherwise send the environment's organization and project to any address.
            default_headers=cast(
                "dict[str, str]", {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
            ),
            http_client=_http_client(),
        )
        self._format = _Format(refused=provider.refuses_base64)

    @property
    def refuses_base64(self) -> bool:
        """Whether this server was seen to refuse `encoding_format`: it is asked without from then on."""
        return self._format.refused

    async def embed(self, call: EmbeddingCall) -> RawReply:
        calls = loads = contentions = 0
        _left.set(call.left)
        while True:
            calls += 1
            try:
                body = await self._request(call)
                self._format.accepted()
                return RawReply(body, calls)
            except (ProviderError, ProviderTimeoutError) as error:
                error.calls = calls
                if isinstance(error, TextRefused) and call.may_test_format and self._format.doubted():
                    continue
                pause_s = _retry_pause_s(error, call.is_interactive, loads, contentions)
                if pause_s is None:
                    raise
                loads += isinstance(error, ModelNotLoaded)
                contentions += not isinstance(error, ModelNotLoaded)
            await asyncio.sleep(pause_s)

    def decode(self, reply: RawReply, expected: int, dimensions: int | None) -> np.ndarray:
        try:
            items = json.loads(reply.body)["data"]
        except (ValueError, TypeError, KeyError):
            raise ReplyRefused(f"not an embedding reply: {scrubbed(_text(reply.body[:500]), self._key)}") from None
        if not isinstance(items, list):
            raise ReplyRefused("not an embedding reply: its data is no list")
        return bind(in_order(items, expected), expected, dimensions)

    async def _request(self, call: EmbeddingCall) -> bytes:
        """One HTTP request under its total deadline: a dripping body defeats a read timeout alone."""
        scope = asyncio.timeout(call.deadline_s)
        try:
            async with scope:
                return await self._post(call)
        except TimeoutError as error:
            lag = asyncio.get_running_loop().time() - (scope.when() or 0)
            if lag > LOOP_LAG_MAX_S:
                raise OwnTimeout("this process stood still past the call's deadline") from error
            raise OpenAICompatibleRequestTimeout(f"no complete reply within {call.deadline_s:g} s") from error
        except openai.APIStatusError as error:
            raise self._of_status(error) from error
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            raise _of_transport(error, call.deadline_s) from error

    async def _post(self, call: EmbeddingCall) -> bytes:
        body: dict[str, Any] = {"model": call.model, "input": list(call.texts), **self._format.parameters()}
        response = await self._client.post(
            "/embeddings", body=body, cast_to=httpx2.Response, options={"timeout": _timeout(call.deadline_s)}
        )
        return response.content

    def _of_status(self, error: openai.APIStatusError) -> ProviderError:
        status = error.status_code
        said = scrubbed(_words(error), self._key)
        message = f"the provider answered {status}: {said}" if said else f"the provider answered {status}"
        if _is_not_loaded(status, said):
            return ModelNotLoaded(message, status=status)
        if status in (401, 403):
            variable = self._key_name or "no variable: set --api-key-env"
            return ProviderUnauthorized(f"{message} (its key comes from {variable})", status=status)
        if status in (429, 503):
            return ProviderBusy(message, status=status, retry_after_ms=_retry_after_ms(error.response.headers))
        if status in _TEXT_STATUS:
            return TextRefused(message, status=status)
        return UnexpectedStatus(message, status=status)


class _Format:
    """Whether the server takes `encoding_format`: base64 is asked for, since parsing floats costs more than the wire.

    A refusal that comes before base64 was ever accepted may be about the format: a call that may test it is sent once
    more without, and what then works is remembered.
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


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Refuses a body over `REPLY_BYTES_MAX`, on errors too: a server's reply never fills our memory."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if left := _left.get():
            request.extensions["trace"] = _note_departure(left)
        response = await super().handle_async_request(request)
        response.stream = _BoundedStream(response.stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> Any:
        received = 0
        async for part in self._stream:
            received += len(part)
            if received > REPLY_BYTES_MAX:
                raise ReplyRefused(f"the reply is over {REPLY_BYTES_MAX} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _note_departure(left: Event) -> Any:
    async def trace(event: str, _: Any) -> None:
        if event.endswith("send_request_body.complete"):
            left.set()

    return trace


def _http_client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=_BoundedTransport(limits=httpx2.Limits(max_connections=None, max_keepalive_connections=8)),
        trust_env=False,
        follow_redirects=False,
        timeout=None,
    )


def _timeout(deadline_s: float) -> httpx2.Timeout:
    return httpx2.Timeout(deadline_s, connect=min(CONNECT_TIMEOUT_S, deadline_s), pool=None)


def _retry_pause_s(error: Exception, is_interactive: bool, loads: int, contentions: int) -> float | None:
    """How long to wait before the call is tried again within its task; None: the failure is final."""
    if isinstance(error, ModelNotLoaded):
        return MODEL_LOAD_PAUSE_S if loads < MODEL_LOAD_RETRIES else None
    status = getattr(error, "status", None)
    contended = is_provider_timeout(error) or status in _CONTENTION_STATUS
    if is_interactive and contended and contentions < CONTENTION_RETRIES:
        return CONTENTION_PAUSE_S
    return None


def _is_not_loaded(status: int, said: str) -> bool:
    if status == 404:
        return True
    return any(all(word in said for word in words) for words in _NOT_LOADED_WORDS.get(status, ()))


def _of_transport(error: Exception, deadline_s: float) -> Exception:
    causes = list(_causes(error))
    if any(isinstance(cause, httpx2.PoolTimeout) for cause in causes):
        return OwnTimeout("our own connection pool had no connection free")
    if any(isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT for cause in causes):
        return ProviderTimeoutError("the connection timed out", code=ETIMEDOUT)
    if any(isinstance(cause, httpx2.TimeoutException) for cause in causes):
        return OpenAICompatibleRequestTimeout(f"no answer within {deadline_s:g} s")
    for cause in causes:
        if isinstance(cause, ReplyRefused):
            return cause
    return ProviderUnreachable(f"no answer from the provider: {type(causes[-1]).__name__}")


def _causes(error: BaseException) -> Any:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _words(error: openai.APIStatusError) -> str:
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return str(body["message"])
    return error.response.text if body is None or isinstance(body, str) else json.dumps(body)


def _retry_after_ms(headers: httpx2.Headers) -> int | None:
    """`Retry-After` in seconds or as a date; None where it is absent or makes no sense."""
    raw = headers.get("retry-after", "").strip()
    if raw.isdigit():
        return int(raw[:9]) * 1000
    try:
        at = parsedate_to_datetime(raw)
    except (TypeError, ValueError):
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0, int((at - datetime.now(UTC)).total_seconds() * 1000))


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")
