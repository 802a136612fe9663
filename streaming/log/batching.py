"""The pause between two rounds of the event log: so that one round carries the events of many turns of the process
(docs/architecture.md, Chat).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class Gathering:
    """So many seconds for each turn that takes part, up to a most: few turns wait for nobody."""

    s_per_turn: float
    s_most: float

    async def pause(self, turns: int) -> None:
        await asyncio.sleep(min(self.s_most, self.s_per_turn * turns))
