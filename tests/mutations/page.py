"""docs/mutations.md: a row for each mutation, from the last run that tried it. The table ends the page."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "mutations.md"
HEAD = "| mechanism broken | guarantee | file | | first witness |\n|---|---|---|---|---|\n"


def rows() -> dict[str, str]:
    """The page's rows, by the names of their mutations."""
    _, _, table = PAGE.read_text().partition(HEAD)
    return {line.removeprefix("| ").partition(" | ")[0]: line for line in table.splitlines()}


def write(tried: Mapping[str, str], names: Sequence[str]) -> None:
    """Replaces the rows that were tried, keeps the others, and drops those that `names` lacks; in the order of `names`."""
    before, _, _ = PAGE.read_text().partition(HEAD)
    known = rows() | dict(tried)
    PAGE.write_text(before + HEAD + "".join(f"{known[name]}\n" for name in names if name in known))
