"""The pause between two rounds of the event log, in which the events of many turns gather for one round (decision 11)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPause:
    """Seconds for each turn that takes part, up to `s_most`: with few turns there is almost no pause."""

    s_per_turn: float
    s_most: float

    async def pause(self, turns: int) -> None:
        await asyncio.sleep(min(self.s_most, self.s_per_turn * turns))
