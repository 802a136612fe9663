"""Chat completion chunks: events -> typed deltas, finish reasons, usage and error frames (docs/architecture.md, Chat).

Pure. A delta counts as delivered if any field of it beside the role holds something; a role-only or empty chunk does not.
Fields of chunks and choices that this module does not know are passed on with the deltas, or kept for the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streaming.upstream import strict_json
from streaming.upstream.deltas import ChatDelta, is_empty, said_by, text_of
from streaming.upstream.error_frames import ERROR_FINISHES, Json, finish_error, frame_error, is_error_frame
from streaming.upstream.errors import ProtocolError, StreamTruncatedError
from streaming.upstream.merging import folded
from streaming.upstream.sse_decoder import IncompleteSseEvent, SseEvent
from streaming.upstream.surrogates import Halves, may_hold_half, without_halves
from streaming.upstream.tool_calls import ToolCalls

# An answer has at most 128 choices; an endless supply of new ones must not fill our memory.
MOST_CHOICES = 128
FINISH_REASON_MAX = 64
# Some servers send these in place of null.
_NO_FINISHES = frozenset({"", "null", "none", "None"})
# They tell a client what to do next: servers that end each choice with a `stop` of their own must not replace them.
_TELLING_FINISHES = frozenset({"tool_calls", "function_call", "length", "content_filter"})
# What keep-alives say that are sent as data, in lower case and without the punctuation around it.
_KEEP_ALIVES = frozenset(
    {"", "alive", "heartbeat", "keep-alive", "keep_alive", "keepalive", "noop", "null", "ping", "pong", "processing"}
)
_PUNCTUATION = " .:[]()<>\"'\t\n"
_KEEP_ALIVE_MAX = 24
# Ours, read by rules of their own, or of no use to a client.
_CHUNK_READ = frozenset({"id", "object", "created", "model", "choices", "usage", "error", "obfuscation"})
_CHOICE_READ = frozenset({"index", "delta", "finish_reason", "message", "text", "error"})


class ChunkReader:
    """The state of one answer while it is read: what was seen, what finished, what was used."""

    def __init__(self, request: Mapping[str, Any] | None = None, scrub: Callable[[str], str] = str) -> None:
        """`request` is the OpenAI request that is answered."""
        wanted, options = (request or {}).get("n"), (request or {}).get("stream_options")
        self.finish_reasons: dict[int, str] = {}
        self.finish_fields: dict[int, Json] = {}
        self.reply_fields: Json = {}
        self.usage: Json | None = None
        self.chunks = 0
        self.delivered = False
        self.is_done = False
        self._choices_wanted = wanted if type(wanted) is int and wanted > 0 else 1
        self._sends_usage = isinstance(options, dict) and options.get("continuous_usage_stats") is True
        self._choices_seen: set[int] = set()
        self._says_elsewhere = False
        self._calls: dict[int, ToolCalls] = {}
        self._halves = Halves()
        self._may_hold_half = False
        self._unsent_fields: Json = {}
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
        if chunk is None:
            return None
        self._may_hold_half = may_hold_half(data)
        return self._take_chunk(chunk, is_named=_is_named(event))

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

    def _parsed(self, event: SseEvent) -> Any:
        """The event's object; None for what is no chunk and no error either."""
        if len(event.data) < _KEEP_ALIVE_MAX and event.data.lower().strip(_PUNCTUATION) in _KEEP_ALIVES:
            return None
        try:
            chunk = strict_json.parse(event.data)
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
        if choices is not None and not isinstance(choices, list):
            raise ProtocolError("malformed_chunk", f"the choices of chunk {self.chunks + 1} are no list")
        if usage and isinstance(usage, dict):
            self.usage = usage
        if isinstance(choices, list) and chunk.keys() - _CHUNK_READ:
            self._note_fields(chunk)
        if not choices and usage is None:
            return None
        self.chunks += 1
        deltas = [self._take_choice(choice) for choice in choices or ()]
        found = [delta for delta in deltas if delta is not None]
        if found:
            self.delivered = True
            found[0].chunk_fields, self._unsent_fields = self._unsent_fields, {}
            if self._sends_usage and usage:
                found[0].chunk_fields = found[0].chunk_fields | {"usage": usage}
        return found

    def _note_fields(self, chunk: Json) -> None:
        """Keeps the chunk's own fields where they are new: some servers repeat them in each chunk."""
        for name, value in chunk.items():
            if name not in _CHUNK_READ and not is_empty(value) and self.reply_fields.get(name) != value:
                self.reply_fields[name] = self._unsent_fields[name] = without_halves(value)

    def _take_choice(self, choice: Any) -> ChatDelta | None:
        index = choice.get("index", 0) if isinstance(choice, dict) else None
        if type(index) is not int or not 0 <= index < MOST_CHOICES:
            raise ProtocolError("malformed_chunk", f"chunk {self.chunks} has a choice that is none")
        self._choices_seen.add(index)
        delta, reason = choice.get("delta"), choice.get("finish_reason")
        if not isinstance(delta, dict):
            delta = {}
        is_finish = isinstance(reason, str) and reason not in _NO_FINISHES
        if is_finish and reason in ERROR_FINISHES:
            raise finish_error(reason, choice, text_of(delta.get("content")), self._scrub)
        if is_finish and not (reason == "stop" and self.finish_reasons.get(index) in _TELLING_FINISHES):
            self.finish_reasons[index] = reason[:FINISH_REASON_MAX]
        said = self._said_by(index, delta, is_last=is_finish)
        fields = {}
        if choice.keys() - _CHOICE_READ:
            fields = {name: value for name, value in choice.items() if name not in _CHOICE_READ and not is_empty(value)}
        if said:
            return ChatDelta(index, said, fields, {})
        if fields:
            earlier = self.finish_fields.get(index)
            self.finish_fields[index] = fields if earlier is None else folded([earlier, fields], joins=_never)
        self._says_elsewhere = self._says_elsewhere or _says_elsewhere(choice)
        return None

    def _said_by(self, index: int, delta: Json, *, is_last: bool) -> Json:
        text = delta.get("content")
        if type(text) is str and text and len(delta) <= 2 and ("role" in delta or len(delta) == 1):
            said = {"content": text}  # Almost every chunk.
        elif delta:
            said = said_by(delta, self._calls.setdefault(index, ToolCalls()))
        else:
            said = {}
        if self._halves or self._may_hold_half:
            said = self._halves.mended(index, said, is_last=is_last)
        return said


def _never(name: str) -> bool:
    return False


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
        return strict_json.parse(data)
    except ValueError:
        return data
