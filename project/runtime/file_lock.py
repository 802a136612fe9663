"""Locks between processes on files made for it (leaf).

A lock goes when the last process that shares its descriptor has closed it, however that process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """The descriptor of the file, which is made where there is none; it is not locked yet."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Whether the lock is now held here; without waiting for another holder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
