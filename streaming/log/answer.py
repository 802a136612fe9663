"""A chat answer as it grows: deltas are joined, and folded into the choices of a chat completion.

Pure. A delta is OpenAI's: `{"content": "..."}`, `{"tool_calls": [...]}`, and other fields that a server sends. The
`fields` of a choice are its own beside the delta, such as log probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streaming.upstream.deltas import TEXT_FIELDS
from streaming.upstream.merging import folded, rest_of

Delta = dict[str, Any]

# The choice's keys in a chat completion that are not `fields`.
_CHOICE_KEYS = frozenset({"index", "message", "finish_reason"})


def joined(first: Delta, second: Delta) -> Delta | None:
    """The two deltas as one, or None where joining them would lose their order."""
    if len(first) != 1 or first.keys() != second.keys():
        return None
    (name,) = first
    if name in TEXT_FIELDS and isinstance(first[name], str) and isinstance(second[name], str):
        return {name: first[name] + second[name]}
    if name == "tool_calls":
        return _joined_calls(first[name], second[name])
    return None


def _joined_calls(first: Any, second: Any) -> Delta | None:
    """Joins argument deltas of one tool call; only the first of a call carries its id and name."""
    if len(first) != 1 or len(second) != 1 or first[0].get("index", 0) != second[0].get("index", 0):
        return None
    function = second[0].get("function") or {}
    if second[0].keys() - {"index", "function"} or function.keys() - {"arguments"}:
        return None
    begun = first[0].get("function") or {}
    arguments = (begun.get("arguments") or "") + (function.get("arguments") or "")
    return {"tool_calls": [{**first[0], "function": {**begun, "arguments": arguments}}]}


def joined_fields(first: Delta, second: Delta) -> Delta:
    """The fields of a choice beside two of its deltas: lists such as log probabilities are appended, the rest replaced."""
    return folded([first, second], joins=_no_text) if first and second else first or second


class Answer:
    """All choices so far. `characters` counts all text, including reasoning, refusals and tool arguments."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self.characters = 0

    def offset(self, choice: int) -> int:
        """The number of characters of the choice's `content`."""
        found = self._choices.get(choice)
        return found.content_length if found else 0

    def add(self, choice: int, delta: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> None:
        part = self._choices.setdefault(choice, _Choice())
        self.characters += part.add(delta)
        if fields:
            part.fields.append(fields)

    def finish(self, choice: int, reason: str, fields: Mapping[str, Any] | None = None) -> None:
        part = self._choices.setdefault(choice, _Choice())
        part.finish_reason = reason
        if fields:
            part.fields.append(fields)

    def choices(self) -> list[dict[str, Any]]:
        """`{"index", "message", "finish_reason"}` of each choice, and its further fields."""
        return [self._choices[index].as_dict(index) for index in sorted(self._choices)]

    def missing_from(self, stored: list[dict[str, Any]]) -> list[tuple[int, Delta, Delta]]:
        """The stored choices' deltas and fields beyond this answer: a reader of a broken log has not seen them."""
        seen = {choice["index"]: choice for choice in self.choices()}
        rest = [(each["index"], *_rest_of_choice(each, seen.get(each["index"], {}))) for each in stored]
        return [(index, delta, fields) for index, delta, fields in rest if delta or fields]

    def finished(self, choice: int) -> bool:
        found = self._choices.get(choice)
        return bool(found and found.finish_reason)


@dataclass
class _Choice:
    """One choice in its pieces: they are folded once, when the choice is asked for."""

    pieces: dict[str, list[Any]] = field(default_factory=dict)
    calls: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    fields: list[Mapping[str, Any]] = field(default_factory=list)
    content_length: int = 0
    finish_reason: str | None = None

    def add(self, delta: Mapping[str, Any]) -> int:
        """Returns the number of characters that the delta adds."""
        characters = 0
        for name, value in delta.items():
            if value is None:
                continue
            if name == "tool_calls":
                characters += sum(self._add_call(call) for call in value)
                continue
            self.pieces.setdefault(name, []).append(value)
            if name in TEXT_FIELDS and isinstance(value, str):
                characters += len(value)
                self.content_length += len(value) if name == "content" else 0
        return characters

    def _add_call(self, call: Mapping[str, Any]) -> int:
        self.calls.setdefault(call.get("index", 0), []).append(call)
        return len((call.get("function") or {}).get("arguments") or "")

    def as_dict(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: folded(pieces, name) for name, pieces in self.pieces.items()}
        if self.calls:
            message["tool_calls"] = [_whole_call(self.calls[at]) for at in sorted(self.calls)]
        fields = folded(self.fields, joins=_no_text) if self.fields else {}
        return {**fields, "index": index, "message": message, "finish_reason": self.finish_reason}


def _whole_call(deltas: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A tool call of its deltas: arguments are joined, of any other field the last that holds something counts."""
    filled = [{name: value for name, value in each.items() if value not in (None, "")} for each in deltas]
    call = folded(filled, joins=_joins_in_calls)
    call.pop("index", None)
    function = {"name": "", "arguments": "", **(call.get("function") or {})}
    return {"id": None, "type": "function", **call, "function": function}


def _rest_of_choice(stored: dict[str, Any], seen: dict[str, Any]) -> tuple[Delta, Delta]:
    message, seen_message = dict(stored["message"]), dict(seen.get("message", {}))
    calls, seen_calls = message.pop("tool_calls", None) or [], seen_message.pop("tool_calls", None) or []
    message.pop("role", None)
    delta = rest_of(message, seen_message) or {}
    numbered = [(at, call, seen_calls[at] if at < len(seen_calls) else None) for at, call in enumerate(calls)]
    rest = [(at, rest_of(call, known, joins=_joins_in_calls)) for at, call, known in numbered]
    if found := [{"index": at, **each} for at, each in rest if each]:
        delta["tool_calls"] = found
    own = {name: value for name, value in stored.items() if name not in _CHOICE_KEYS}
    return delta, rest_of(own, {name: seen.get(name) for name in own}, joins=_no_text) or {}


def _joins_in_calls(name: str) -> bool:
    return name in ("arguments", "input")


def _no_text(name: str) -> bool:
    return False
