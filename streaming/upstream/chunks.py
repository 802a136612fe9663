"""Chat completion chunks: events -> typed deltas, finish reasons, usage and error frames (docs/architecture.md, Chat).

Pure. Knows what counts as delivered: non-empty text, reasoning, refusal or tool-call deltas; a role-only or empty chunk
does not. Each delta carries the provider's own objects, so that whatever else they hold survives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streaming.upstream import strict_json
from streaming.upstream.error_frames import ERROR_FINISHES, Json, finish_error, frame_error, is_error_frame
from streaming.upstream.errors import ProtocolError, StreamTruncatedError
from streaming.upstream.sse_decoder import IncompleteSseEvent, SseEvent
from streaming.upstream.tool_calls import ToolCalls, says_something

# An answer has at most 128 choices; an endless supply of new ones must not fill our memory.
MOST_CHOICES = 128
FINISH_REASON_MAX = 64
# Some servers send these in place of null.
_NO_FINISHES = frozenset({"", "null", "none", "None"})


@dataclass(slots=True)
class ChatDelta:
    """What one chunk added to one choice; never empty.

    `tool_calls` have the API's shape. `choice` and `chunk` are the provider's own objects: only they hold log
    probabilities, ids and a legacy `function_call`. With `is_plain` there is nothing but text, which can be joined to
    neighbouring deltas.
    """

    index: int
    text: str
    reasoning: str
    refusal: str
    tool_calls: list[Json]
    is_plain: bool
    choice: Json
    chunk: Json


class ChunkReader:
    """The state of one answer while it is read: what was seen, what finished, what was used."""

    def __init__(self, choices: int = 1, scrub: Callable[[str], str] = str) -> None:
        self.finish_reasons: dict[int, str] = {}
        self.usage: Json | None = None
        self.chunks = 0
        self.delivered = False
        self.is_done = False
        self._choices_wanted = choices
        self._choices_seen: set[int] = set()
        self._says_elsewhere = False
        self._calls: dict[int, ToolCalls] = {}
        self._scrub = scrub

    @property
    def is_finished(self) -> bool:
        """Every choice that was asked for, and every one that came, has its finish reason."""
        finished = len(self.finish_reasons)
        return finished >= self._choices_wanted and finished == len(self._choices_seen)

    def read(self, event: SseEvent) -> list[ChatDelta] | None:
        """The deltas of a chunk, possibly none; None if the event is no chunk: a heartbeat, `[DONE]`, empty data.

        Raises ProviderFrameError for an error frame, ProtocolError for what is not JSON or no chunk.
        """
        data = event.data
        if event.type == "error":
            raise frame_error(_lenient_json(data), self._scrub)
        if not data or data.isspace():
            return None
        if data.startswith("[DONE]"):
            self.is_done = True
            return None
        chunk = self._parsed(event)
        return None if chunk is None else self._take_chunk(chunk, is_named=_is_named(event))

    def read_incomplete(self, event: IncompleteSseEvent) -> list[ChatDelta] | None:
        """The same for an event whose blank line never came: a whole chunk counts, a cut one is a truncation."""
        try:
            return self.read(SseEvent(event.type.decode(), event.data.decode(), ""))
        except (UnicodeDecodeError, ProtocolError) as error:
            raise StreamTruncatedError("incomplete_event") from error

    def fault(self, *, lenient: bool) -> StreamTruncatedError | ProtocolError | None:
        """The error of an answer that is incomplete when its stream has ended; None if it is complete.

        Text outside a delta is no answer, so a stream of nothing else has failed. A lenient provider may leave out the
        finish reasons or `[DONE]`, but not both: nothing else distinguishes a finished answer from one that was cut.
        """
        if self._says_elsewhere and not self.delivered:
            return ProtocolError("no_delta", "the answer is not in the text of a delta: this is no chat stream")
        unfinished = self._choices_seen - self.finish_reasons.keys()
        if self.finish_reasons and not unfinished and (self.is_done or self.is_finished):
            return None
        if lenient and self.is_done and self.delivered:
            return None
        if self.delivered:
            return StreamTruncatedError("no_finish_reason")
        return StreamTruncatedError("no_content" if self.chunks else "no_chunks")

    def _parsed(self, event: SseEvent) -> Json | None:
        try:
            chunk = _parse(event.data)
        except ValueError as error:
            if _is_named(event):
                return None
            raise ProtocolError("malformed_json", f"chunk {self.chunks + 1} of the stream is not JSON") from error
        if isinstance(chunk, list) and len(chunk) == 1 and isinstance(chunk[0], dict):
            chunk = chunk[0]
        if isinstance(chunk, dict):
            return chunk
        if _is_named(event):
            return None
        raise ProtocolError("malformed_chunk", f"chunk {self.chunks + 1} of the stream is no object")

    def _take_chunk(self, chunk: Json, *, is_named: bool) -> list[ChatDelta] | None:
        if is_error_frame(chunk, is_named=is_named):
            raise frame_error(chunk, self._scrub)
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        if choices is None and usage is None:
            return None
        self.chunks += 1
        if choices is not None and not isinstance(choices, list):
            raise ProtocolError("malformed_chunk", f"the choices of chunk {self.chunks} are no list")
        deltas = [self._take_choice(choice, chunk) for choice in choices or ()]
        found = [delta for delta in deltas if delta is not None]
        self.delivered = self.delivered or bool(found)
        return found

    def _take_choice(self, choice: Any, chunk: Json) -> ChatDelta | None:
        index = choice.get("index", 0) if isinstance(choice, dict) else None
        if type(index) is not int or not 0 <= index < MOST_CHOICES:
            raise ProtocolError("malformed_chunk", f"chunk {self.chunks} has a choice that is none")
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            delta = {}
        self._choices_seen.add(index)
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason not in _NO_FINISHES:
            if reason in ERROR_FINISHES:
                raise finish_error(reason, choice, text_of(delta.get("content")), self._scrub)
            self.finish_reasons[index] = reason[:FINISH_REASON_MAX]
        found = self._delta_of(index, delta, choice, chunk)
        if found is None and not self._says_elsewhere:
            self._says_elsewhere = _says_elsewhere(choice)
        return found

    def _delta_of(self, index: int, delta: Json, choice: Json, chunk: Json) -> ChatDelta | None:
        """None if the delta holds nothing that counts as delivered."""
        text = delta.get("content")
        if type(text) is not str:
            text = text_of(text)
        if len(delta) <= 2 and text and ("role" in delta or len(delta) == 1):  # Almost every chunk.
            return ChatDelta(index, text, "", "", [], choice.get("logprobs") is None, choice, chunk)
        reasoning = text_of(delta.get("reasoning_content")) or text_of(delta.get("reasoning"))
        refusal = text_of(delta.get("refusal"))
        calls = delta.get("tool_calls")
        tool_calls = self._calls.setdefault(index, ToolCalls()).read(calls) if calls else []
        legacy_call = says_something(delta.get("function_call"))
        if not (text or reasoning or refusal or tool_calls or legacy_call):
            return None
        is_plain = bool(text) and not (reasoning or refusal or tool_calls or legacy_call or choice.get("logprobs"))
        return ChatDelta(index, text, reasoning, refusal, tool_calls, is_plain, choice, chunk)


def text_of(content: Any) -> str:
    """Content as text; some servers send a list of typed parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))


def _is_named(event: SseEvent) -> bool:
    """Whether the event has a name of its own: servers send heartbeats and status that way, with any data."""
    return event.type not in ("", "message")


def _says_elsewhere(choice: Json) -> bool:
    """Whether a choice has text where a chat stream has none: in `message`, in `text`, or in a delta that is no object."""
    delta, message = choice.get("delta"), choice.get("message")
    if choice.get("text") or (delta and not isinstance(delta, dict)):
        return True
    said = message if isinstance(message, dict) else delta or {}
    content, calls = said.get("content"), said.get("tool_calls")
    if isinstance(message, dict):
        return bool(content or calls)
    return bool(content and not isinstance(content, list)) or bool(calls and not isinstance(calls, list))


def _lenient_json(data: str) -> Any:
    try:
        return _parse(data)
    except ValueError:
        return data


def _parse(data: str) -> Any:
    parsed = strict_json.parse(data)
    # Only an escape can hold a lone surrogate, which no database and no socket accepts.
    return _without_lone_surrogates(parsed) if "\\ud" in data or "\\uD" in data else parsed


def _without_lone_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_lone_surrogates(name): _without_lone_surrogates(item) for name, item in value.items()}
    return value
