"""Bounded polling for tests: the one way to wait for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# What takes milliseconds and is promised within a second, where every core is taken. What else would end it (a budget
# of 30 s, a lease) is far longer, or the test reads from the end's own name which of them it was.
PROMPTLY_S = 5.0


def eventually(predicate: Callable[[], T], timeout: float = 30.0, interval: float = 0.01, message: str = "") -> T:
    """Call `predicate` every `interval` seconds and return its first truthy value.

    Raises AssertionError after `timeout` seconds, naming what was awaited and the last value seen.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            awaited = message or getattr(predicate, "__qualname__", repr(predicate))
            raise AssertionError(f"not within {timeout} s: {awaited} (last value: {value!r})")
        time.sleep(interval)
