"""Formats events as server-sent events: the native stream, and chunks for OpenAI clients (pure)."""

from __future__ import annotations

from typing import Any

from streaming import codes
from streaming.http.openai_shape import Shape, error_of
from streaming.log import events
from streaming.log.events import Event, to_json

HEARTBEAT = b": heartbeat\n\n"
DONE = b"data: [DONE]\n\n"


def native(event: Event) -> bytes:
    """One event as `GET /api/chat/turns/{id}/events` sends it. Only events of the log have an id to resume from."""
    head = f"id: {event.seq}\n" if event.seq else ""
    data = to_json({"attempt": event.attempt, **event.data})
    return f"{head}event: {event.type}\ndata: {data}\n\n".encode()


class OpenAIStream:
    """One turn's events as chat completion chunks. Usage comes last, if the client asked for it."""

    def __init__(self, shape: Shape, *, include_usage: bool) -> None:
        self._common = shape.chunk_head()
        self._head = _head(self._common)
        self._include_usage = include_usage
        self._usage: dict[str, Any] | None = None
        self._sources: list[Any] = []
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._delivered = False
        self._waiting: dict[str, Any] = {}

    def render(self, event: Event) -> bytes:
        """The bytes for this event; empty if OpenAI's format has no equivalent."""
        if event.type == events.DELTA:
            choice = event.data["choice"]
            delta = self._begin(choice) | event.data["delta"]
            self._delivered = True
            fields = self._fields(event.data.get("chunk_fields", {}))
            own = event.data.get("fields", {})
            return self._chunk([{**own, "index": choice, "delta": delta, "finish_reason": None}], **fields)
        if event.type == events.FINISH:
            return self._finish(event.data["choice"], event.data["finish_reason"], event.data.get("fields", {}))
        if event.type == events.FIELDS:
            # They go with the finish that follows: some clients take a chunk without choices for usage.
            self._waiting = self._fields(event.data["fields"])
        if event.type == events.USAGE:
            self._usage = event.data["usage"]
        elif event.type == events.SOURCES:
            self._sources = event.data["sources"]
        elif event.type == events.NOTICE:
            return self.keep_alive()
        elif event.type == events.END:
            return self._end(event.data)
        return b""

    def keep_alive(self) -> bytes:
        """A chunk that adds nothing: comments break clients that take any line without `data:` for an error's text."""
        return self._chunk([{"index": 0, "delta": self._begin(0), "finish_reason": None}])

    def _finish(self, choice: int, reason: str, fields: dict[str, Any]) -> bytes:
        self._finished.add(choice)
        return self._chunk([{**fields, "index": choice, "delta": self._begin(choice), "finish_reason": reason}])

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of one chunk; those that are words (`system_fingerprint`) are in each chunk from here on."""
        words = {name: value for name, value in fields.items() if isinstance(value, str)}
        if words:
            self._common = words | self._common
            self._head = _head(self._common)
        return {name: value for name, value in fields.items() if name not in self._common}

    def _begin(self, choice: int) -> dict[str, Any]:
        if choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"role": "assistant"}

    def _end(self, data: dict[str, Any]) -> bytes:
        last = b""
        if data["error_code"] == codes.ANSWER_TOO_LONG:
            last = b"".join(self._finish(choice, "length", {}) for choice in sorted(self._begun - self._finished))
        elif data["state"] != "completed":
            return b"data: " + _dumps(error_of(data, delivered=self._delivered).body()) + b"\n\n"
        if self._include_usage:
            last += self._chunk([], usage=self._usage)
        return last + DONE

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        fields, self._waiting = self._waiting | fields, {}
        if self._sources:
            fields["sources"], self._sources = self._sources, []
        return self._head + _dumps({"choices": choices, **fields})[1:] + b"\n\n"


def _head(common: dict[str, Any]) -> bytes:
    return b"data: " + _dumps(common)[:-1] + b","


def _dumps(value: Any) -> bytes:
    return to_json(value).encode()
