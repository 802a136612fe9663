"""Excludes everything a process has loaded at its start from the garbage collector's full collections.

A full round over all of Django and the SDK takes a tenth of a second, in which every stream of the process stands still.
"""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Call it once, when everything is imported and before work comes."""
    gc.collect()
    gc.freeze()
