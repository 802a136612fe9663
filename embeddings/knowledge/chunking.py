"""Cut the text of one file into chunks of whole lines (docs/architecture.md, Sweep).

Syntax proposes where to cut. Cuts are moved to line starts, and a part that is still too large is split at blank
lines and low indentation. So line numbers alone are enough to show a chunk's place and to find its text again.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from embeddings.knowledge import syntax
from embeddings.knowledge.token_estimate import units_within, weigh

_CAPACITY_STEPS = 8
_SMALL = 6
_SEPARATORS = (" ", ";", "}", ",", ">")


@dataclass(frozen=True)
class Chunk:
    """`text` is lines `start_line` to `end_line`, 1-based and inclusive, separated by "\\n".

    Only a line that exceeds the limits by itself is split; the text is then a part of that line.
    """

    ordinal: int
    start_line: int
    end_line: int
    text: str


@dataclass(frozen=True)
class ChunkLimits:
    """Upper bounds of one chunk. Tokens are estimated, and include the two special tokens around a text."""

    max_characters: int = 1200
    max_tokens: int = 512

    def __post_init__(self) -> None:
        # Any single character must fit into a chunk.
        if self.max_characters < 1 or self.max_tokens < 8:
            raise ValueError("a chunk holds at least 1 character and 8 tokens")


def chunk(path: str, text: str, limits: ChunkLimits) -> list[Chunk]:
    """Splits the text into ordered chunks that hold every non-blank line once; none is blank or exceeds the limits.

    The path only selects the grammar. A text that the grammar cannot parse in reasonable time is split by lines.
    """
    if not text or text.isspace():
        return []
    file = _File(text, limits)
    if file.fits(0, file.line_count):
        spans = [(0, file.line_count)]
    else:
        # Ask for smaller parts if the text has many tokens per character, so that they need no second split. Splitters
        # are cached by capacity, hence the steps.
        allowed = units_within(limits.max_tokens) * len(text) // max(1, weigh(text))
        step = max(1, limits.max_characters // _CAPACITY_STEPS)
        capacity = max(step, min(limits.max_characters, allowed) // step * step)
        spans = list(file.joined(file.spans(syntax.cuts(path, text, capacity))))
    pieces = (piece for begin, stop in spans for piece in file.pieces(begin, stop))
    return [Chunk(ordinal, first + 1, last + 1, piece) for ordinal, (first, last, piece) in enumerate(pieces)]


class _File:
    """A text and its lines; ranges of lines are 0-based and end before `stop`."""

    def __init__(self, text: str, limits: ChunkLimits) -> None:
        self._text = text
        self._max_characters = limits.max_characters
        self._max_units = units_within(limits.max_tokens)
        lines = text.split("\n")
        self.line_count = len(lines)
        # Line i is text[starts[i] : starts[i + 1] - 1], so there is one more entry than there are lines.
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def fits(self, begin: int, stop: int) -> bool:
        """Whether these lines fit into one chunk."""
        if self._length(begin, stop) > self._max_characters:
            return False
        return self._is_light(self._slice(begin, stop))

    def spans(self, offsets: list[int]) -> Iterator[tuple[int, int]]:
        """Ranges of lines between the cuts. A cut inside a line moves to the line's start, or past its trailing blanks."""
        lines = {0, self.line_count}
        for offset in offsets:
            line = bisect_right(self._starts, offset) - 1
            is_trailing = offset > self._starts[line] and not self._text[offset : self._starts[line + 1]].strip()
            lines.add(line + 1 if is_trailing else line)
        return pairwise(sorted(lines))

    def joined(self, spans: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The spans, with small ones merged into a neighbour where both fit into one chunk."""
        begin, stop = next(spans)
        small = self._max_characters // _SMALL
        for next_begin, next_stop in spans:
            shorter = min(self._length(begin, stop), self._length(next_begin, next_stop))
            if shorter > small or not self.fits(begin, next_stop):
                yield begin, stop
                begin = next_begin
            stop = next_stop
        yield begin, stop

    def pieces(self, begin: int, stop: int) -> Iterator[tuple[int, int, str]]:
        """First line, last line and text of each chunk in these lines."""
        while True:
            begin, stop = self._trimmed(begin, stop)
            if begin == stop:
                return
            end = stop if self.fits(begin, stop) else self._best_break(begin, self._furthest(begin, stop))
            if end == begin:
                end = begin + 1
                yield from ((begin, begin, piece) for piece in self._parts_of_line(begin))
            else:
                _, last = self._trimmed(begin, end)
                yield begin, last - 1, self._slice(begin, last)
            begin = end

    def _trimmed(self, begin: int, stop: int) -> tuple[int, int]:
        while begin < stop and self._is_blank(begin):
            begin += 1
        while begin < stop and self._is_blank(stop - 1):
            stop -= 1
        return begin, stop

    def _furthest(self, begin: int, stop: int) -> int:
        """The furthest end at which the lines from `begin` are within the limits; `begin` if not even one line is."""
        end = bisect_right(self._starts, self._starts[begin] + self._max_characters + 1, begin, stop + 1) - 1
        if end == begin or self._is_light(self._slice(begin, end)):
            return end
        units = 0
        for line in range(begin, end):
            units += weigh(self._slice(line, line + 1))
            if units > self._max_units:
                return line
        return end

    def _best_break(self, begin: int, end: int) -> int:
        """The best line to break before in the second half: after a blank line, else the least indented, else the last."""

        def quality(line: int) -> tuple[bool, int, int]:
            if line >= self.line_count:
                return True, 0, line
            text = self._slice(line, line + 1)
            return line > 0 and self._is_blank(line - 1), len(text.lstrip()) - len(text), line

        middle = bisect_right(self._starts, (self._starts[begin] + self._starts[end]) // 2, begin, end)
        return max(range(min(middle, end), end + 1), key=quality)

    def _parts_of_line(self, line: int) -> Iterator[str]:
        position, end = self._starts[line], self._starts[line + 1] - 1
        while position < end:
            part = self._text[position : min(position + self._max_characters, end)]
            while (units := weigh(part)) > self._max_units:
                part = part[: max(1, min(len(part) - 1, len(part) * self._max_units // units))]
            if position + len(part) < end:
                # Up to the last separator, unless that is far from the end of the part.
                cut = max(part.rfind(separator) for separator in _SEPARATORS) + 1
                part = part[:cut] if cut > len(part) * 3 // 4 else part
            position += len(part)
            if part.strip():
                yield part

    def _length(self, begin: int, stop: int) -> int:
        return self._starts[stop] - 1 - self._starts[begin]

    def _slice(self, begin: int, stop: int) -> str:
        return self._text[self._starts[begin] : self._starts[stop] - 1]

    def _is_blank(self, line: int) -> bool:
        return not self._slice(line, line + 1).strip()

    def _is_light(self, text: str) -> bool:
        return weigh(text) <= self._max_units
