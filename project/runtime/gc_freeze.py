"""Excludes the objects loaded at a process's start from the garbage collector's full collections.

A full collection over Django and the SDK takes 0.1 s, during which every stream of the process is blocked.
"""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Call once, after all imports and before the first work."""
    gc.collect()
    gc.freeze()
