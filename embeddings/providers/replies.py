"""Binding a reply's vectors to the texts that were sent. A reply that fails a check binds nothing."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from embeddings.errors import DimensionMismatch, ReplyNotFinite, ReplyRefused
from embeddings.providers.base import scrubbed


def listed(body: bytes, field: str | None, secret: str) -> list[Any]:
    """The list in the body's `field` (None: the body itself). Raises ReplyRefused, which quotes the body without the secret."""
    try:
        found = json.loads(body) if field is None else json.loads(body)[field]
    except (ValueError, TypeError, KeyError, RecursionError):
        said = scrubbed(body[:500].decode("utf-8", "replace"), secret)
        raise ReplyRefused(f"not an embedding reply: {said}") from None
    if not isinstance(found, list):
        raise ReplyRefused(f"not an embedding reply: its {field or 'body'} is no list")
    return found


def bind(embeddings: Sequence[Any], expected: int, dimensions: int | None) -> np.ndarray:
    """`float32[expected, dimensions]` from one embedding per text, already in the order of the texts.

    An embedding is a list of numbers or numeric strings, or base64 of little-endian float32. Raises ReplyRefused (count,
    shape), DimensionMismatch (both numbers named) or ReplyNotFinite (NaN, infinity, null).
    """
    if len(embeddings) != expected:
        raise ReplyRefused(f"{expected} texts were sent and {len(embeddings)} vectors came back")
    vectors = [_vector(embedding) for embedding in embeddings]
    lengths = {len(vector) for vector in vectors}
    if len(lengths) != 1 or 0 in lengths:
        raise ReplyRefused(f"the vectors of one reply have {sorted(lengths)} dimensions")
    (found,) = lengths
    if dimensions is not None and found != dimensions:
        raise DimensionMismatch(f"the reply has {found} dimensions, this generation has {dimensions}")
    bound = np.stack(vectors)
    if not np.isfinite(bound).all():
        raise ReplyNotFinite("the reply holds NaN, infinity or null")
    return bound


def in_order(items: Sequence[Any], expected: int) -> list[Any]:
    """The `embedding` of each item, placed by `index`; positional only if every index is missing."""
    if not all(isinstance(item, dict) and "embedding" in item for item in items):
        raise ReplyRefused("an item of the reply has no embedding")
    if len(items) != expected:
        raise ReplyRefused(f"{expected} texts were sent and {len(items)} vectors came back")
    indices = [item.get("index") for item in items]
    if all(index is None for index in indices):
        return [item["embedding"] for item in items]
    if any(type(index) is not int for index in indices) or sorted(indices) != list(range(expected)):
        raise ReplyRefused(f"the reply's indices do not name each of the {expected} texts once")
    placed: list[Any] = [None] * expected
    for item in items:
        placed[item["index"]] = item["embedding"]
    return placed


def _vector(embedding: Any) -> np.ndarray:
    if isinstance(embedding, str):
        return _from_base64(embedding)
    if not isinstance(embedding, list):
        raise ReplyRefused(f"an embedding is neither a list nor base64 but {type(embedding).__name__}")
    if any(value is None for value in embedding):
        raise ReplyNotFinite("the reply holds NaN, infinity or null")
    if not all(type(value) in (int, float, str) for value in embedding):
        raise ReplyRefused("a vector holds something that is no number")
    try:
        return _narrow(np.array([float(value) for value in embedding], dtype=np.float64))
    except (ValueError, OverflowError):
        raise ReplyRefused("a vector holds something that is no number") from None


def _narrow(wide: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return wide.astype(np.float32)


def _from_base64(text: str) -> np.ndarray:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ReplyRefused("an embedding is text that is not base64") from None
    if len(content) % 4:
        raise ReplyRefused("an embedding's base64 does not hold whole float32 numbers")
    return np.frombuffer(content, dtype="<f4")
