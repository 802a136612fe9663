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


def comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


class OpenAIStream:
    """One turn's events as chat completion chunks. Usage comes last, if the client asked for it."""

    def __init__(self, shape: Shape, *, include_usage: bool) -> None:
        self._head = b"data: " + _dumps(shape.chunk_head())[:-1] + b","
        self._include_usage = include_usage
        self._usage: dict[str, Any] | None = None
        self._sources: list[Any] = []
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    def render(self, event: Event) -> bytes:
        """The bytes for this event; empty if OpenAI's format has no equivalent."""
        if event.type == events.DELTA:
            choice = event.data["choice"]
            delta = self._begin(choice) | event.data["delta"]
            extra = {"logprobs": event.data["logprobs"]} if event.data.get("logprobs") else {}
            return self._chunk([{"index": choice, "delta": delta, "finish_reason": None, **extra}])
        if event.type == events.FINISH:
            return self._finish(event.data["choice"], event.data["finish_reason"])
        if event.type == events.USAGE:
            self._usage = event.data["usage"]
        elif event.type == events.SOURCES:
            self._sources = event.data["sources"]
        elif event.type == events.NOTICE:
            return comment(f"{event.data['notice']} for {event.data['seconds']} s")
        elif event.type == events.END:
            return self._end(event.data)
        return b""

    def _finish(self, choice: int, reason: str) -> bytes:
        self._finished.add(choice)
        return self._chunk([{"index": choice, "delta": self._begin(choice), "finish_reason": reason}])

    def _begin(self, choice: int) -> dict[str, Any]:
        if choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"role": "assistant"}

    def _end(self, data: dict[str, Any]) -> bytes:
        last = b""
        if data["error_code"] == codes.ANSWER_TOO_LONG:
            last = b"".join(self._finish(choice, "length") for choice in sorted(self._begun - self._finished))
        elif data["state"] != "completed":
            return b"data: " + _dumps(error_of(data).body()) + b"\n\n"
        if self._include_usage:
            last += self._chunk([], usage=self._usage)
        return last + DONE

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        if self._sources:
            fields["sources"], self._sources = self._sources, []
        return self._head + _dumps({"choices": choices, **fields})[1:] + b"\n\n"


def _dumps(value: Any) -> bytes:
    return to_json(value).encode()
