"""One attempt of a chat turn: open the request, check that the reply is a stream, guard it (docs/architecture.md, Chat).

    async with open_attempt(config, request, is_cancelled=..., label="turn=... attempt=1") as attempt:
        async for delta in attempt:     # ChatDelta; only what counts as delivered
            ...
    attempt.result                      # AttemptResult: how it ended, whatever it was

Nothing that the provider or the network does is raised: it is in the result, typed and classified. What is raised is a
cancellation of the task (the result is then `cancelled` or `interrupted`) and an error of our own. However the block is
left, its socket is free afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import httpx2
import openai

from embeddings.providers.base import NO_KEY, scrubbed
from embeddings.providers.http_base import retry_after_ms
from streaming.upstream.budgets import LARGEST_BUDGET_MS
from streaming.upstream.chunks import ChunkReader
from streaming.upstream.deltas import ChatDelta
from streaming.upstream.errors import (
    ChatStreamError,
    EndState,
    FinishGraceElapsedError,
    ProtocolError,
    ProviderStatusError,
    StreamCancelledError,
    TransportError,
)
from streaming.upstream.provider_config import ProviderConfig
from streaming.upstream.retry import NOTHING_TO_RETRY, RetryClassification, classify_retry_error, end_of
from streaming.upstream.sse_decoder import SseDecodeError, SseDecoder
from streaming.upstream.stream_clock import StreamClock
from streaming.upstream.stream_start import stream_of
from streaming.upstream.transport import http_client, shut_down, typed_transport_error
from streaming.upstream.watchdog import CLEANUP_S, StreamGuard, close_within

__all__ = ["AttemptResult", "ChatDelta", "ProviderConfig", "UpstreamAttempt", "close_clients", "open_attempt"]

logger = logging.getLogger(__name__)

_TRANSPORT_ERRORS = openai.APIConnectionError | httpx2.HTTPError | httpx2.StreamError | httpx2.InvalidURL | OSError
# Set by the pipeline; the other fields of a request are sent unchanged.
_OWN_FIELDS = frozenset({"model", "messages", "stream", "stream_options"})


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended, and what it received. Times of waiting are milliseconds of waiting for upstream.

    `error` is None exactly if the answer is complete. `detail` is fit for people: bounded, scrubbed, without answer text.
    `finish_fields` are what a choice's finish brought beside its reason, `reply_fields` the reply's own fields.
    `first_content_ms` and `waited_ms` do not contain the consumer's own time.
    """

    end_state: EndState
    error_kind: str
    error: BaseException | None
    classification: RetryClassification
    delivered: bool
    chunks: int
    bytes: int
    comments: int
    finish_reasons: Mapping[int, str]
    finish_fields: Mapping[int, dict[str, Any]]
    reply_fields: Mapping[str, Any]
    usage: Mapping[str, Any] | None
    started_at: datetime
    ended_at: datetime
    first_content_at: datetime | None
    first_content_ms: int | None
    longest_gap_ms: int
    waited_ms: int

    @property
    def error_code(self) -> str:
        """The error's machine code; empty for a complete answer."""
        return "" if self.error is None else str(getattr(self.error, "code", type(self.error).__name__))

    @property
    def transport_code(self) -> str | None:
        return self.classification.transport_code

    @property
    def status(self) -> int | None:
        """The provider's HTTP status, from its reply or from an error frame."""
        return self.classification.status

    @property
    def detail(self) -> str:
        return "" if self.error is None else str(self.error)


def open_attempt(
    config: ProviderConfig,
    request: Mapping[str, Any],
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
    label: str = "chat attempt",
) -> UpstreamAttempt:
    """An attempt at `request`, an OpenAI chat completion request; always streamed, and always with usage.

    `is_cancelled` tells whether the user has cancelled. It only names an end; to end the attempt, cancel its task. `label`
    starts the log lines.
    """
    return UpstreamAttempt(config, request, is_cancelled, label)


class UpstreamAttempt:
    """An async context manager and an async iterator of ChatDelta; use it once, by `open_attempt`."""

    def __init__(
        self, config: ProviderConfig, request: Mapping[str, Any], is_cancelled: Callable[[], bool], label: str
    ) -> None:
        self._config = config
        self._request = request
        self._is_cancelled = is_cancelled
        self._label = label
        self._clock = StreamClock(config.budgets)
        self._guard = StreamGuard(self._clock, self._abort, is_cancelled)
        self._decoder = SseDecoder()
        self._reader = ChunkReader(request, self._scrub)
        self._response: httpx2.Response | None = None
        self._started_at = datetime.now(UTC)
        self._first_content_at: datetime | None = None
        self._error: BaseException | None = None
        self._result: AttemptResult | None = None
        self._deltas = self._run()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._deltas.aclose()

    def __aiter__(self) -> AsyncIterator[ChatDelta]:
        return self._deltas

    @property
    def result(self) -> AttemptResult:
        """How it ended; RuntimeError while it has not."""
        if self._result is None:
            raise RuntimeError("the attempt has not ended")
        return self._result

    def quiet_ms(self) -> int:
        """For how long upstream has sent no chunk; call it on the attempt's loop."""
        return self._clock.quiet_ms(asyncio.get_running_loop().time())

    async def _run(self) -> AsyncGenerator[ChatDelta, None]:
        logger.info("%s starts: model=%s %s", self._label, self._config.model, self._config.budgets.describe())
        try:
            async with _client_of(self._config) as sdk, aclosing(self._reply(sdk)) as deltas:
                async for delta in deltas:
                    yield delta
        except (asyncio.CancelledError, GeneratorExit) as error:
            self._error = StreamCancelledError() if self._is_cancelled() else asyncio.CancelledError(*error.args)
            raise
        except Exception as error:  # What the result cannot name is raised again below.
            self._error = self._typed(error)
            if not isinstance(self._error, ChatStreamError | None):
                raise
        finally:
            self._conclude()

    async def _reply(self, sdk: openai.AsyncOpenAI) -> AsyncGenerator[ChatDelta, None]:
        """Sends the request and yields the reply's deltas; its connection is free afterwards, whatever happens."""
        call = sdk.chat.completions.with_streaming_response.create(**self._parameters())
        try:
            response = await self._guard.wait(call.__aenter__())
            self._response = response.http_response
            async with aclosing(self._stream(response.http_response)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._guard.stop()
            await close_within(partial(call.__aexit__, None, None, None), CLEANUP_S)

    async def _stream(self, http: httpx2.Response) -> AsyncGenerator[ChatDelta, None]:
        """The deltas of a stream. Raises the error that ended it, if one did."""
        self._clock.headers_arrived()
        body = http.aiter_bytes() if http.headers.get("content-encoding") else http.aiter_raw()
        packets = self._guard.watch(body, lambda packet: self._clock.bytes_arrived(len(packet)))
        key_bytes = len((self._config.api_key or "").encode())
        async with aclosing(stream_of(http, packets, self._scrub, key_bytes)) as stream:
            async for packet in stream:
                for delta in self._read(packet):
                    yield delta
        # The last event may lack its blank line.
        incomplete = None if self._reader.is_done else self._decoder.finish()
        if incomplete is not None:
            for delta in self._progress(self._reader.read_incomplete(incomplete) or []):
                yield delta
        fault = self._reader.fault(lenient=self._config.lenient)
        if fault is not None:
            raise fault

    def _read(self, packet: bytes) -> Iterator[ChatDelta]:
        if self._reader.is_done:
            return
        reader = self._reader
        for event in self._decoder.feed(packet):
            deltas = reader.read(event)
            if deltas is not None:
                yield from self._progress(deltas)
            elif reader.is_done:
                self._clock.done()
                return

    def _progress(self, deltas: list[ChatDelta]) -> list[ChatDelta]:
        self._clock.chunk_arrived()
        if deltas:
            if self._first_content_at is None:
                self._first_content_at = datetime.now(UTC)
            self._clock.content_arrived()
        if self._reader.is_finished:
            self._clock.finished(said_more=bool(deltas))
        else:
            self._clock.unfinished()
        return deltas

    def _typed(self, error: Exception) -> BaseException | None:
        """The typed error that ended the attempt. Once the answer is over, a failure counts as the stream's own end."""
        typed: Exception = error
        if isinstance(error, SseDecodeError):
            typed = ProtocolError(error.kind, str(error))
        elif isinstance(error, openai.APIStatusError):
            typed = self._status_error(error)
        elif isinstance(error, _TRANSPORT_ERRORS):
            typed = typed_transport_error(error)
        reader = self._reader
        is_over = reader.is_finished or reader.is_done or isinstance(typed, FinishGraceElapsedError)
        if isinstance(typed, ChatStreamError) and is_over:
            return reader.fault(lenient=self._config.lenient)
        if isinstance(typed, TransportError):  # The causes decide its classification, and that of no other error.
            typed.__cause__ = error
        return typed

    def _status_error(self, error: openai.APIStatusError) -> ProviderStatusError:
        body = error.body if isinstance(error.body, dict) else {}
        message = body.get("message")
        code = body.get("code") if isinstance(body.get("code"), str) else body.get("type")
        param = body.get("param")
        wished = retry_after_ms(error.response.headers)
        return ProviderStatusError(
            error.status_code,
            self._scrub(message if isinstance(message, str) and message else error.response.text),
            provider_code=self._scrub(code) if isinstance(code, str) else None,
            param=self._scrub(param) if isinstance(param, str) else None,
            retry_after_ms=None if wished is None else min(wished, LARGEST_BUDGET_MS),
        )

    def _conclude(self) -> None:
        end_state, error_kind = end_of(self._error)
        now, clock, reader = asyncio.get_running_loop().time(), self._clock, self._reader
        self._result = AttemptResult(
            end_state=end_state,
            error_kind=error_kind,
            error=self._error,
            classification=NOTHING_TO_RETRY if self._error is None else classify_retry_error(self._error),
            delivered=reader.delivered,
            chunks=reader.chunks,
            bytes=clock.bytes_received,
            comments=self._decoder.comments,
            finish_reasons=reader.finish_reasons,
            finish_fields=reader.finish_fields,
            reply_fields=reader.reply_fields,
            usage=reader.usage,
            started_at=self._started_at,
            ended_at=datetime.now(UTC),
            first_content_at=self._first_content_at,
            first_content_ms=clock.first_content_ms,
            longest_gap_ms=clock.longest_gap_ms,
            waited_ms=clock.waited_ms(now),
        )
        facts = (self._label, end_state, error_kind or "-", reader.chunks, clock.bytes_received)
        logger.info("%s ended: state=%s kind=%s chunks=%d bytes=%d", *facts)

    def _parameters(self) -> dict[str, Any]:
        stream_options = self._request.get("stream_options")
        return {
            "model": self._config.model,
            "messages": self._request["messages"],
            "stream": True,
            "stream_options": {**(stream_options if isinstance(stream_options, dict) else {}), "include_usage": True},
            "extra_body": {name: value for name, value in self._request.items() if name not in _OWN_FIELDS},
        }

    def _abort(self) -> None:
        if self._response is not None:
            shut_down(self._response)

    def _scrub(self, text: str) -> str:
        return scrubbed(text, self._config.api_key or "")


# --- one client for each provider and loop -------------------------------------------------------------------------
@dataclass
class _Client:
    """A client in use by so many attempts; once replaced, the last of them closes it."""

    reached_by: tuple[str, str | None]
    sdk: openai.AsyncOpenAI
    users: int = 0
    is_replaced: bool = False


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, _Client]] = WeakKeyDictionary()


async def close_clients() -> None:
    """Closes this loop's clients: before the loop goes. Attempts that still run keep theirs until they end."""
    for client in _clients.pop(asyncio.get_running_loop(), {}).values():
        client.is_replaced = True
        await _close_if_unused(client)


@asynccontextmanager
async def _client_of(config: ProviderConfig) -> AsyncIterator[openai.AsyncOpenAI]:
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    client = clients.get(config.provider_id)
    if client is None or client.reached_by != (config.base_url, config.api_key):
        replaced, client = client, _new_client(config)
        clients[config.provider_id] = client
    else:
        replaced = None
    client.users += 1
    try:
        if replaced is not None:
            replaced.is_replaced = True
            await _close_if_unused(replaced)
        yield client.sdk
    finally:
        client.users -= 1
        await _close_if_unused(client)


async def _close_if_unused(client: _Client) -> None:
    if client.is_replaced and client.users == 0:
        await close_within(client.sdk.close, CLEANUP_S)


def _new_client(config: ProviderConfig) -> _Client:
    sdk = openai.AsyncOpenAI(
        base_url=config.base_url,
        # Left without a key, organization or project, the SDK would send the environment's to any address.
        api_key=config.api_key or NO_KEY,
        default_headers=cast(
            Mapping[str, str], {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
        ),
        max_retries=0,
        timeout=None,
        http_client=http_client(),
    )
    return _Client(reached_by=(config.base_url, config.api_key), sdk=sdk)
