"""Values that arrive in pieces, as one value (docs/architecture.md, Chat). Pure.

A provider may send any field in pieces: a picture's data, a transcript, citations, fields of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# Of these the last value counts: servers repeat them in each piece.
NAMES = frozenset({"format", "id", "index", "model", "name", "object", "role", "type"})


def joins_texts(name: str) -> bool:
    """Whether the texts of this field are pieces of one text."""
    return name not in NAMES


def folded(pieces: Sequence[Any], name: str = "", joins: Callable[[str], bool] = joins_texts) -> Any:
    """The pieces of one field as one value, in time that grows with their size.

    Lists are appended, objects are folded field by field, texts are joined where `joins` allows it for the field's name.
    Of anything else, and where the types differ, the last value counts.
    """
    kind = type(pieces[-1])
    if len(pieces) == 1 or any(type(piece) is not kind for piece in pieces):
        return pieces[-1]
    if kind is str and joins(name):
        return "".join(pieces)
    if kind is list:
        return [item for piece in pieces for item in piece]
    if kind is dict:
        names = dict.fromkeys(each for piece in pieces for each in piece)
        return {each: folded([piece[each] for piece in pieces if each in piece], each, joins) for each in names}
    return pieces[-1]


def rest_of(whole: Any, seen: Any, name: str = "", joins: Callable[[str], bool] = joins_texts) -> Any:
    """The piece that makes `whole` of `seen` by `folded`; None if nothing is missing."""
    if type(whole) is not type(seen):
        return whole
    if isinstance(whole, dict):
        rest = {each: rest_of(value, seen.get(each), each, joins) for each, value in whole.items()}
        return {each: value for each, value in rest.items() if value is not None} or None
    if isinstance(whole, list) or (isinstance(whole, str) and joins(name)):
        return whole[len(seen) :] or None
    return None if whole == seen else whole
