"""A chat answer as it grows: deltas are joined, and folded into the choices of a chat completion.

Pure. A delta is OpenAI's: `{"content": "..."}`, `{"tool_calls": [...]}`, and other fields that a server sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Delta = dict[str, Any]

TEXT_FIELDS = frozenset({"content", "reasoning_content", "reasoning", "refusal"})


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


def merged_logprobs(first: Any, second: Any) -> Any:
    """The token lists of two deltas, one after the other; None where neither has any."""
    lists = [_token_lists(each) for each in (first, second)]
    names = dict.fromkeys(name for each in lists for name in each)
    return {name: [token for each in lists for token in each.get(name, [])] for name in names} or None


def _token_lists(logprobs: Any) -> dict[str, list[Any]]:
    """The lists alone: only lists can be concatenated."""
    found = logprobs if isinstance(logprobs, dict) else {}
    return {name: tokens for name, tokens in found.items() if isinstance(tokens, list)}


class Answer:
    """All choices so far. `characters` counts all text, including reasoning, refusals and tool arguments."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self.characters = 0

    def offset(self, choice: int) -> int:
        """The number of characters of the choice's `content`."""
        found = self._choices.get(choice)
        return found.lengths.get("content", 0) if found else 0

    def add(self, choice: int, delta: Mapping[str, Any], logprobs: Any = None) -> None:
        part = self._choices.setdefault(choice, _Choice())
        self.characters += part.add(delta)
        if logprobs:
            part.logprobs = merged_logprobs(part.logprobs, logprobs)

    def finish(self, choice: int, reason: str) -> None:
        self._choices.setdefault(choice, _Choice()).finish_reason = reason

    def choices(self) -> list[dict[str, Any]]:
        """`{"index", "message", "finish_reason"}` of each choice, with `logprobs` where there are any."""
        return [self._choices[index].as_dict(index) for index in sorted(self._choices)]

    def missing_from(self, stored: list[dict[str, Any]]) -> list[tuple[int, Delta]]:
        """The stored choices' content beyond this answer, as deltas: a reader of a broken log has not seen it."""
        rest = ((choice["index"], self._rest(choice["index"], choice["message"])) for choice in stored)
        return [(index, delta) for index, delta in rest if delta]

    def finished(self, choice: int) -> bool:
        found = self._choices.get(choice)
        return bool(found and found.finish_reason)

    def _rest(self, index: int, message: Mapping[str, Any]) -> Delta:
        lengths = self._choices.get(index, _Choice()).lengths
        rest: Delta = {}
        for name in TEXT_FIELDS & message.keys():
            if tail := (message[name] or "")[lengths.get(name, 0) :]:
                rest[name] = tail
        calls = [_rest_of_call(at, call, lengths) for at, call in enumerate(message.get("tool_calls") or [])]
        if calls := [call for call in calls if call]:
            rest["tool_calls"] = calls
        return rest


@dataclass
class _Choice:
    parts: dict[str, list[str]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    logprobs: Any = None

    def add(self, delta: Mapping[str, Any]) -> int:
        return sum(self._add_field(name, value) for name, value in delta.items() if value is not None)

    def _add_field(self, name: str, value: Any) -> int:
        if name in TEXT_FIELDS and isinstance(value, str):
            return self._add_text(name, value)
        if name == "tool_calls":
            return sum(self._add_call(call) for call in value)
        self.others[name] = value
        return 0

    def _add_text(self, name: str, text: str) -> int:
        self.parts.setdefault(name, []).append(text)
        self.lengths[name] = self.lengths.get(name, 0) + len(text)
        return len(text)

    def _add_call(self, call: Mapping[str, Any]) -> int:
        index = call.get("index", 0)
        kept = self.calls.setdefault(index, {"id": None, "type": "function", "function": {"name": ""}})
        function = call.get("function") or {}
        kept.update({name: call[name] for name in ("id", "type") if call.get(name)})
        if function.get("name"):
            kept["function"]["name"] = function["name"]
        return self._add_text(f"tool_calls.{index}", function.get("arguments") or "")

    def as_dict(self, index: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **self.others}
        message |= {name: "".join(parts) for name, parts in self.parts.items() if name in TEXT_FIELDS}
        if self.calls:
            message["tool_calls"] = [self._call(at) for at in sorted(self.calls)]
        choice = {"index": index, "message": message, "finish_reason": self.finish_reason}
        return choice | ({"logprobs": self.logprobs} if self.logprobs else {})

    def _call(self, at: int) -> dict[str, Any]:
        call = self.calls[at]
        arguments = "".join(self.parts.get(f"tool_calls.{at}", []))
        return {**call, "function": {**call["function"], "arguments": arguments}}


def _rest_of_call(at: int, call: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any] | None:
    seen = lengths.get(f"tool_calls.{at}")
    arguments = call["function"]["arguments"]
    if seen is None:
        return {"index": at, **call}
    return {"index": at, "function": {"arguments": arguments[seen:]}} if arguments[seen:] else None
