"""Tables of commands: with rules and colours on a terminal, aligned plain lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TextIO, cast

from django.core.management.base import OutputWrapper
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_STYLES = {
    "ok": "green",
    "warning": "yellow",
    "error": "red",
    "succeeded": "green",
    "unchanged": "green",
    "completed": "green",
    "deferred": "yellow",
    "skipped": "yellow",
    "cancelled": "yellow",
    "degraded": "yellow",
    "paused": "yellow",
    "failed": "red",
    "interrupted": "red",
    "open": "red",
}


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns; `numbers` are aligned right, `empty` is printed if there are no rows.

    `if_any` names the columns to omit when every row is empty or 0 there.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()
    empty: str = ""
    if_any: frozenset[str] = frozenset()

    def narrowed(self) -> Table:
        """Without the `if_any` columns that are empty or 0 in every row: a terminal is 80 characters wide."""
        kept = [
            index
            for index, column in enumerate(self.columns)
            if column not in self.if_any or any(row[index] not in ("", "0") for row in self.rows)
        ]
        return replace(
            self,
            columns=[self.columns[index] for index in kept],
            rows=[[row[index] for index in kept] for row in self.rows],
        )


def render(table: Table, stream: OutputWrapper) -> None:
    """Writes the table: with rules and colours on a terminal, elsewhere as aligned lines with the column names first."""
    table = table.narrowed()
    rows = [[printable(cell) for cell in row] for row in table.rows]
    if not rows:
        stream.write(table.empty)
    elif stream.isatty():
        shown = RichTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for column in table.columns:
            shown.add_column(column, justify="right" if column in table.numbers else "left", overflow="fold")
        for row in rows:
            shown.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        console(stream).print(shown)
    else:
        lines = [list(table.columns), *rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(table.columns))]
        right = [column in table.numbers for column in table.columns]
        for line in lines:
            cells = zip(line, widths, right, strict=True)
            padded = (cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in cells)
            stream.write("  ".join(padded).rstrip())


def console(stream: OutputWrapper) -> Console:
    """A rich console on a command's stream. NO_COLOR is honoured."""
    return Console(file=cast(TextIO, stream), highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """Replaces control characters: a repository's or server's text must not control the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
