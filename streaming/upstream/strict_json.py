"""JSON that every reader accepts: no NaN, no infinity, no nesting too deep for a database or a recursion. Pure."""

from __future__ import annotations

import json
from typing import Any, NoReturn

DEPTH_MAX = 100


def parse(text: str | bytes) -> Any:
    """The value. ValueError for what is not JSON, for a number without a finite value, and for deeper nesting."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    # A text with fewer brackets than the bound cannot be nested deeper; that is almost every text.
    if text.count("{") + text.count("[") > DEPTH_MAX and _is_deeper(value, DEPTH_MAX):
        raise ValueError("nested too deeply")
    return value


def _is_deeper(value: Any, bound: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return bound == 0 or any(_is_deeper(each, bound - 1) for each in inner)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
