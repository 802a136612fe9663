"""One row of the results: a measurement, its target, and whether the target is met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Better = Literal["at least", "at most", "exactly"]
HEADINGS = ("benchmark", "what", "number", "target", "verdict")


@dataclass(frozen=True)
class Row:
    """`value` is the median of `samples`; a row without a `target` is for comparison."""

    benchmark: str
    what: str
    samples: tuple[float, ...]
    unit: str = ""
    target: float | None = None
    better: Better = "at least"
    decimals: int = 2

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "compare"
        met = {
            "at least": self.value >= self.target,
            "at most": self.value <= self.target,
            "exactly": self.value == self.target,
        }
        return "met" if met[self.better] else "MISSED"

    def cells(self) -> tuple[str, ...]:
        number = self._shown(self.value)
        if len(self.samples) > 1:
            number += (
                f" ({self._shown(min(self.samples))} to {self._shown(max(self.samples))}, {len(self.samples)} runs)"
            )
        return (self.benchmark, self.what, number, self._target(), self.verdict)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "value": self.value, "verdict": self.verdict}

    def _target(self) -> str:
        if self.target is None:
            return ""
        sign = {"at least": ">= ", "at most": "<= ", "exactly": ""}[self.better]
        return f"{sign}{self._shown(self.target)}"

    def _shown(self, number: float) -> str:
        return f"{number:,.{self.decimals}f}{' ' if self.unit else ''}{self.unit}"


def from_json(data: dict[str, Any]) -> Row:
    known = {name: data[name] for name in Row.__dataclass_fields__}
    return Row(**{**known, "samples": tuple(data["samples"])})


def as_markdown(rows: Sequence[Row]) -> str:
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
