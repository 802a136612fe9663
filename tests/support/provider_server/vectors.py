"""Deterministic embeddings: a text's vector comes from its hash, so that a stored vector proves its text."""

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FloatVector = npt.NDArray[np.float32]


def vector_of(text: str, dimensions: int = 384) -> FloatVector:
    """The unit-length float32[dimensions] vector that the server answers for `text`."""
    digest = hashlib.shake_128(text.encode("utf-8", "surrogatepass")).digest(2 * dimensions)
    vector = np.frombuffer(digest, dtype="<i2").astype(np.float32) + np.float32(0.5)
    return vector / np.float32(np.sqrt(vector @ vector))


def to_base64(vector: Sequence[float] | FloatVector) -> str:
    """Little-endian float32 in base64, as `encoding_format: base64` has it."""
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")


@lru_cache(maxsize=8192)
def base64_of(text: str, dimensions: int) -> str:
    return to_base64(vector_of(text, dimensions))


@lru_cache(maxsize=2048)
def json_floats_of(text: str, dimensions: int) -> str:
    """Nine digits restore a float32 exactly, and formatting them costs a third of what `json.dumps` takes."""
    numbers = ",".join(["%.9g"] * dimensions)
    return f"[{numbers}]" % tuple(vector_of(text, dimensions).tolist())
