"""First texts first: while a turn of this process waits for its own, answers that flood pause after each share.

A start is some twenty rounds of the loop and a few statements in other threads. Between them a flood would take the
processor each time for as long as its packets last; it loses nothing by a pause that is shorter than the joining of
its deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

# Deltas of one answer between two looks at the others.
SHARE = 4
PAUSE_S = 0.005

# Filled and emptied in threads and on the loop: single operations of a set, which need no lock.
_starting: set[str] = set()


@contextlib.contextmanager
def starting(turn: str) -> Iterator[None]:
    """The turn waits for its first text, until `has_text` or the end of the block."""
    _starting.add(turn)
    try:
        yield
    finally:
        _starting.discard(turn)


def has_text(turn: str) -> None:
    """The turn's first text is there. Once is enough, more often does no harm."""
    _starting.discard(turn)


async def after_share() -> None:
    """Lets the others have their turn; for longer while there are any that wait for their first text."""
    await asyncio.sleep(PAUSE_S if _starting else 0)
