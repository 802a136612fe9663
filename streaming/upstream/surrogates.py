"""Halves of surrogate pairs, which only an escape in JSON can hold and no database stores (docs/architecture.md, Chat).

Servers that cut text by UTF-16 units send the halves of one emoji in two deltas: they are joined. Pure.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def may_hold_half(data: str) -> bool:
    """Whether this JSON text may hold a half of a surrogate pair."""
    return "\\ud" in data or "\\uD" in data


def without_halves(value: Any) -> Any:
    """The value with pairs joined, and with each single half replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [without_halves(item) for item in value]
    if isinstance(value, dict):
        return {without_halves(name): without_halves(item) for name, item in value.items()}
    return value


class Halves:
    """The first halves that wait for their second, one for each place of an answer."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, str, int], str] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def mended(self, choice: int, said: Json, *, is_last: bool) -> Json:
        """The delta with whole characters alone: a first half at a text's end is kept for the choice's next delta.

        With `is_last` no second half can follow: what waits is replaced by U+FFFD.
        """
        texts = {name: text for name, text in said.items() if isinstance(text, str)}
        if is_last:
            texts = {name: "" for at, name, call in self._waiting if at == choice and not call} | texts
        mended: Json = {name: self._mended((choice, name, 0), text, is_last=is_last) for name, text in texts.items()}
        mended = {name: text for name, text in mended.items() if text}
        for name, value in said.items():
            if name == "tool_calls":
                mended[name] = [self._call(choice, call, is_last=is_last) for call in value]
            elif name not in texts:
                mended[name] = without_halves(value)
        return mended

    def _call(self, choice: int, call: Json, *, is_last: bool) -> Json:
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(arguments, str):
            cleaned: Json = without_halves(call)
            return cleaned
        place = (choice, "arguments", call["index"] + 1)
        whole = self._mended(place, arguments, is_last=is_last)
        return {**without_halves(call), "function": {**without_halves(function), "arguments": whole}}

    def _mended(self, place: tuple[int, str, int], text: str, *, is_last: bool) -> str:
        text = self._waiting.pop(place, "") + text
        if text and "\ud800" <= text[-1] <= "\udbff" and not is_last:
            self._waiting[place], text = text[-1], text[:-1]
        return str(without_halves(text))
