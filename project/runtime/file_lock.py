"""Locks between processes, on lock files (leaf).

The kernel releases a lock when the last process that shares its descriptor closes it or ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """The descriptor of the lock file, created if missing; not locked yet."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Takes the lock if it is free, without waiting; whether this process holds it now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
