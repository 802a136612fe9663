"""Fairness between turns: an answer that floods yields after each share of deltas, and pauses while turns start (decision 12).

A start takes some twenty rounds of the loop and a few statements, in threads that a busy loop keeps from the processor. A pause
no longer than the joining of deltas costs a flood nothing. It is made only for a moment after a start, so that a model that
thinks for seconds delays no other turn.
"""

from __future__ import annotations

import asyncio
import time

# Deltas of one answer before the loop runs the other turns.
SHARE = 8
PAUSE_S = 0.020
MOMENT_S = 0.100

_started_at = [float("-inf")]


def note_start() -> None:
    """Notes that a turn starts in this process; from any thread."""
    _started_at[0] = time.monotonic()


async def after_share() -> None:
    """Lets the other turns run; for longer in the moment after a start."""
    is_starting = time.monotonic() - _started_at[0] < MOMENT_S
    await asyncio.sleep(PAUSE_S if is_starting else 0)
