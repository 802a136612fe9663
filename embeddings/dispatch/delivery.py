"""Delivers vectors to an interactive caller: a Valkey list wakes it at once; the task's row is the truth."""

from __future__ import annotations

import base64
import logging
import time
from typing import Any

import numpy as np

from embeddings.runtime import valkey

logger = logging.getLogger(__name__)

_TTL_S = 60


def encode(vectors: np.ndarray) -> list[str]:
    """`float32[n, dimensions]` as the task's row keeps it: base64 of little-endian float32, one per text."""
    return [base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode() for vector in vectors]


def decode(kept: Any) -> np.ndarray:
    return np.stack([np.frombuffer(base64.b64decode(text), dtype="<f4") for text in kept])


def announce(task_id: int) -> None:
    """Wakes the caller that waits for the task: the task has ended, well or not."""
    try:
        with valkey.client().pipeline() as pipeline:
            pipeline.lpush(_key(task_id), b"1")
            pipeline.expire(_key(task_id), _TTL_S)
            pipeline.execute()
    except valkey.UNREACHABLE as error:
        logger.warning("a waiting caller could not be woken (%s): it polls the row", type(error).__name__)


def wait(task_id: int, seconds: float) -> None:
    """Waits for the announcement, at most `seconds`; may return early: the caller looks at the row."""
    try:
        valkey.client().blpop([_key(task_id)], timeout=seconds)
    except valkey.UNREACHABLE:
        time.sleep(min(seconds, 0.2))


def _key(task_id: int) -> str:
    return f"sluicegate:embedded:{task_id}"
