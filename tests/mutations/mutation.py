"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mechanism broken: `old` becomes `new` in `file`, and of `tests` (pytest's own words) one must fail.

    `old` must stand exactly once in the file.
    """

    name: str
    guarantee: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
