"""Chat completion chunks: events -> typed deltas, finish reasons, usage and error frames (docs/architecture.md, Chat).

Pure. Knows what counts as delivered: non-empty text, reasoning, refusal or tool-call deltas; a role-only or empty chunk
does not. Each delta carries the provider's own objects, so that whatever else they hold survives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from streaming.errors import ProtocolError, ProviderFrameError, StreamTruncatedError
from streaming.sse_decoder import IncompleteSseEvent, SseEvent

Json = dict[str, Any]

# An answer has at most 128 choices; an endless supply of new ones must not fill our memory.
MOST_CHOICES = 128
_ERROR_FINISHES = frozenset({"error", "error_finish"})


@dataclass(slots=True)
class ChatDelta:
    """What one chunk added to one choice: never nothing.

    `choice` and `chunk` are the provider's own objects: log probabilities, ids and a legacy `function_call` stand in
    them alone. `is_plain` says that there is nothing but text, so that it can be joined to its neighbours.
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
            self._raise_frame(_lenient_json(data))
        if not data or data.isspace():
            return None
        if data.startswith("[DONE]"):
            self.is_done = True
            return None
        chunk = self._parsed(event)
        return None if chunk is None else self._take_chunk(chunk)

    def read_incomplete(self, event: IncompleteSseEvent) -> list[ChatDelta] | None:
        """The same for an event whose blank line never came: a whole chunk counts, a cut one is a truncation."""
        try:
            return self.read(SseEvent(event.type.decode(), event.data.decode(), ""))
        except (UnicodeDecodeError, ProtocolError) as error:
            raise StreamTruncatedError("incomplete_event") from error

    def truncation(self, *, lenient: bool) -> StreamTruncatedError | None:
        """What is missing from an answer whose stream has ended; None if it is complete.

        A lenient provider may leave out the finish reasons, but not both them and its `[DONE]`: nothing else tells an
        answer that is over from one that was cut.
        """
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
        except (ValueError, RecursionError) as error:
            if event.type not in ("", "message"):  # Heartbeats are sent as named events with any data.
                return None
            raise ProtocolError("malformed_json", f"chunk {self.chunks + 1} of the stream is not JSON") from error
        if not isinstance(chunk, dict):
            raise ProtocolError("malformed_chunk", f"chunk {self.chunks + 1} of the stream is no object")
        return chunk

    def _take_chunk(self, chunk: Json) -> list[ChatDelta] | None:
        if chunk.get("error") or chunk.get("object") == "error":
            self._raise_frame(chunk)
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
        if isinstance(reason, str) and reason:
            if reason in _ERROR_FINISHES:
                self._raise_error_finish(reason, choice, delta)
            self.finish_reasons[index] = reason
        return _delta_of(index, delta, choice, chunk)

    def _raise_error_finish(self, reason: str, choice: Json, delta: Json) -> NoReturn:
        """A failure dressed as a finish: its message stands where the answer would, and is not one."""
        error = choice.get("error")
        said = error if isinstance(error, dict) else {"message": _text_of(delta.get("content")), "code": reason}
        self._raise_frame({"error": said})

    def _raise_frame(self, frame: Any) -> NoReturn:
        error = frame.get("error") if isinstance(frame, dict) else frame
        error = frame if error is None else error
        if not isinstance(error, dict):
            raise ProviderFrameError(self._scrub(str(error)))
        code, status = error.get("code"), error.get("status")
        name = code if isinstance(code, str) and not code.isdigit() else error.get("type")
        raise ProviderFrameError(
            self._scrub(_message_of(error)),
            provider_code=self._scrub(name) if isinstance(name, str) else None,
            status=_http_status(code) or _http_status(status),
        )


def _delta_of(index: int, delta: Json, choice: Json, chunk: Json) -> ChatDelta | None:
    """None where nothing that counts as delivered stands in the delta."""
    text = delta.get("content")
    if type(text) is not str:
        text = _text_of(text)
    if len(delta) <= 2 and text and ("role" in delta or len(delta) == 1):  # By far the most of all chunks.
        return ChatDelta(index, text, "", "", [], choice.get("logprobs") is None, choice, chunk)
    reasoning = _text_of(delta.get("reasoning_content")) or _text_of(delta.get("reasoning"))
    refusal = _text_of(delta.get("refusal"))
    calls = delta.get("tool_calls")
    tool_calls = [call for call in calls if _says_something(call)] if isinstance(calls, list) else []
    legacy_call = _says_something(delta.get("function_call"))
    if not (text or reasoning or refusal or tool_calls or legacy_call):
        return None
    is_plain = bool(text) and not (reasoning or refusal or tool_calls or legacy_call or choice.get("logprobs"))
    return ChatDelta(index, text, reasoning, refusal, tool_calls, is_plain, choice, chunk)


def _says_something(call: Any) -> bool:
    """Whether a tool-call delta carries an id, a name or arguments; its index and type alone say nothing."""
    if not isinstance(call, dict):
        return False
    return any(
        _says_something(value) if isinstance(value, dict) else isinstance(value, str) and value
        for name, value in call.items()
        if name != "type"
    )


def _text_of(content: Any) -> str:
    """Content as text; some servers send a list of typed parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(_text_of(part.get("text")) for part in content if isinstance(part, dict))


def _message_of(error: Json) -> str:
    message = error.get("message")
    return message if isinstance(message, str) and message else json.dumps(error)


def _http_status(code: Any) -> int | None:
    number = int(code) if isinstance(code, str) and code.isdecimal() and len(code) == 3 else code
    return number if type(number) is int and 400 <= number <= 599 else None


def _lenient_json(data: str) -> Any:
    try:
        return _parse(data)
    except (ValueError, RecursionError):
        return data


def _parse(data: str) -> Any:
    parsed = _DECODER.decode(data)
    # Only escapes can smuggle in half a character, which no database and no socket would take.
    return _without_lone_surrogates(parsed) if "\\ud" in data or "\\uD" in data else parsed


def _without_lone_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_lone_surrogates(name): _without_lone_surrogates(item) for name, item in value.items()}
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
