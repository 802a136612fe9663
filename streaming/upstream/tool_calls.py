"""Tool-call deltas in the API's shape, from the shapes that servers send (docs/architecture.md, Chat). Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

Json = dict[str, Any]


@dataclass
class ToolCalls:
    """The tool calls of one choice: each delta is given to its call, whatever index and id the server sent with it.

    A delta that names a function begins a call, unless its id, or without an id its index, is that of a call already.
    A delta without a name goes on with the call at its index, or without an index with the last one, even where its id
    is new: some servers send a fresh id with each delta, or the index 0 with each call.
    """

    _by_id: dict[str, int] = field(default_factory=dict)
    _by_index: dict[int, int] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    _last: int = 0

    def read(self, calls: Any) -> list[Json]:
        """The deltas that carry anything, each with its `index` and its arguments as text; the first of a call has an id."""
        found = [_with_text(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        return [self._placed(call) for call in found if says_something(call)]

    def _placed(self, call: Json) -> Json:
        index = call.get("index") if type(call.get("index")) is int else None
        name = call["id"] if isinstance(call.get("id"), str) and call["id"] else None
        place = self._place_of(index, name, is_named=_is_named(call))
        is_new = place not in self._begun
        self._begun.add(place)
        self._last = place
        if index is not None:
            self._by_index[index] = place
        if is_new:
            name = name or f"call_{uuid4().hex[:24]}"
        elif self._by_id.get(name or "") != place:
            name = None
        if name is not None:
            self._by_id[name] = place
        return {key: value for key, value in call.items() if key != "id"} | {
            "index": place,
            **({} if name is None else {"id": name}),
        }

    def _place_of(self, index: int | None, name: str | None, *, is_named: bool) -> int:
        if name in self._by_id:
            return self._by_id[name]
        known = self._by_index.get(index) if index is not None else (self._last if self._begun else None)
        # A name begins a call, unless its index alone is given and known: some servers repeat the name in each delta.
        begins = is_named and (name is not None or index is None)
        if known is not None and not begins:
            return known
        if index is not None and index not in self._begun:
            return index
        return max(self._begun, default=-1) + 1


def says_something(call: Any) -> bool:
    """Whether a tool-call delta carries an id, a name or arguments; its index and type alone say nothing."""
    if not isinstance(call, dict):
        return False
    return any(
        says_something(value) if isinstance(value, dict) else isinstance(value, str) and bool(value)
        for name, value in call.items()
        if name != "type"
    )


def _is_named(call: Json) -> bool:
    """Whether the delta names its function, or its tool of another type."""
    tools = [value for value in call.values() if isinstance(value, dict)]
    return any(isinstance(tool.get("name"), str) and tool["name"] for tool in tools)


def _with_text(call: Json) -> Json:
    """The call with its arguments as text and without an empty name: some servers send one with each delta."""
    function = call.get("function")
    whole = function if isinstance(function, dict) else {}
    arguments, name = whole.get("arguments"), whole.get("name")
    if (
        isinstance(function, dict)
        and (arguments is None or isinstance(arguments, str))
        and (name or "name" not in whole)
    ):
        return call
    kept = {key: value for key, value in whole.items() if key != "name" or value}
    return {**call, "function": kept if arguments is None else {**kept, "arguments": _text_of(arguments)}}


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
