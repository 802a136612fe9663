"""One choice's delta: the fields that hold something, text as text (docs/architecture.md, Chat). Pure.

Whatever field a server sends beside the role counts as delivered and is passed on: pictures, audio, annotations, and
fields that do not exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streaming.upstream.tool_calls import ToolCalls, says_something

Json = dict[str, Any]

TEXT_FIELDS = frozenset({"content", "reasoning_content", "reasoning", "refusal"})
# Read by rules of their own, or of no use to a client.
_READ = TEXT_FIELDS | {"role", "tool_calls", "function_call", "obfuscation"}


@dataclass(slots=True)
class ChatDelta:
    """What one chunk added to one choice; never empty.

    `said` has the delta's fields, without the role and without empty ones: text as text, `tool_calls` in the API's shape,
    any other field as it was sent. `choice_fields` are the choice's own beside the delta (log probabilities, token ids),
    `chunk_fields` the chunk's, where they differ from what earlier chunks had.
    """

    index: int
    said: Json
    choice_fields: Json
    chunk_fields: Json

    @property
    def text(self) -> str:
        return str(self.said.get("content", ""))


def is_empty(value: Any) -> bool:
    """Whether the value holds nothing: null, false, no text, or a list or an object of such values."""
    if isinstance(value, dict):
        return all(is_empty(each) for each in value.values())
    if isinstance(value, list):
        return all(is_empty(each) for each in value)
    return value is None or value is False or value == ""


def said_by(delta: Json, calls: ToolCalls) -> Json:
    """The fields of a delta that hold something; empty for a delta that says nothing."""
    said: Json = {}
    content = delta.get("content")
    if isinstance(content, list):
        said = _said_in_parts(content)
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        if name not in said and (text := text_of(delta.get(name))):
            said[name] = text
    if found := calls.read(delta.get("tool_calls")):
        said["tool_calls"] = found
    if says_something(delta.get("function_call")):
        said["function_call"] = delta["function_call"]
    said |= {name: value for name, value in delta.items() if name not in _READ and not is_empty(value)}
    return said


def _said_in_parts(parts: list[Any]) -> Json:
    """Content that a server sends as a list of typed parts: its text, its thinking, and the parts of any other type."""
    objects = [part for part in parts if isinstance(part, dict)]
    said: Json = {"content": text_of(parts), "reasoning_content": "".join(text_of(p.get("thinking")) for p in objects)}
    if others := [p for p in objects if not {"text", "thinking"} & p.keys() and not is_empty(p)]:
        said["content_parts"] = others
    return {name: value for name, value in said.items() if value}


def text_of(content: Any) -> str:
    """Content as text; some servers send a list of typed parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
