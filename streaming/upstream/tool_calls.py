"""Tool-call deltas in the API's shape, from the shapes that servers send (docs/architecture.md, Chat). Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class ToolCalls:
    """The tool calls of one choice.

    Some servers send no index, or always 0: a new id means a new call.
    """

    _by_id: dict[str, int] = field(default_factory=dict)
    _by_index: dict[int, int] = field(default_factory=dict)
    _last: int = 0

    def read(self, calls: Any) -> list[Json]:
        """The deltas that carry anything, each with its `index` and with its arguments as text."""
        found = [_with_text(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        return [self._placed(call) for call in found if says_something(call)]

    def _placed(self, call: Json) -> Json:
        index, place = call.get("index"), self._place_of(call)
        self._last = place
        if type(index) is int:
            self._by_index[index] = place
        return call if type(index) is int and place == index else {**call, "index": place}

    def _place_of(self, call: Json) -> int:
        index, name = call.get("index"), call.get("id")
        if not (isinstance(name, str) and name):
            return self._by_index.get(index, index) if type(index) is int else self._last
        if name not in self._by_id:
            taken = self._by_id.values()
            free = max(taken, default=-1) + 1
            self._by_id[name] = index if type(index) is int and index not in taken else free
        return self._by_id[name]


def says_something(call: Any) -> bool:
    """Whether a tool-call delta carries an id, a name or arguments; its index and type alone say nothing."""
    if not isinstance(call, dict):
        return False
    return any(
        says_something(value) if isinstance(value, dict) else isinstance(value, str) and bool(value)
        for name, value in call.items()
        if name != "type"
    )


def _with_text(call: Json) -> Json:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(function, dict) and (arguments is None or isinstance(arguments, str)):
        return call
    whole = function if isinstance(function, dict) else {}
    return {**call, "function": {**whole, **({} if arguments is None else {"arguments": json.dumps(arguments)})}}
