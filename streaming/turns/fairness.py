"""Starts first: for a moment after each start of this process, answers that flood pause after each share.

A start is some twenty rounds of the loop and a few statements, in threads that a full loop keeps from the processor. The
flood loses nothing by a pause no longer than the joining of its deltas. Starts come in bursts, hence the moment; it is
bounded, so that a model that thinks for seconds holds nobody up.
"""

from __future__ import annotations

import asyncio
import time

# Deltas of one answer between two looks at the others.
SHARE = 8
PAUSE_S = 0.020
MOMENT_S = 0.100

_started_at = [float("-inf")]


def note_start() -> None:
    """A turn is to start: in any thread."""
    _started_at[0] = time.monotonic()


async def after_share() -> None:
    """Lets the others have their turn; for longer in the moment after a start."""
    is_starting = time.monotonic() - _started_at[0] < MOMENT_S
    await asyncio.sleep(PAUSE_S if is_starting else 0)
