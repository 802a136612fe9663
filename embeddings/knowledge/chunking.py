"""Cut the text of one file into chunks of whole lines (docs/architecture.md, Sweep)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """`text` is lines `start_line` to `end_line`, 1-based and inclusive, as "\\n" separates them."""

    ordinal: int
    start_line: int
    end_line: int
    text: str


@dataclass(frozen=True)
class ChunkLimits:
    """The most that one chunk may hold; tokens are estimated."""

    max_characters: int = 1200
    max_tokens: int = 512


def chunk(path: str, text: str, limits: ChunkLimits) -> list[Chunk]:
    """Chunks that cover every non-blank line once, in order."""
    chunks: list[Chunk] = []
    begin, size, lines = 0, 0, text.split("\n")
    for index, line in enumerate([*lines, ""]):
        size += len(line) + 1
        if index == len(lines) or size > limits.max_characters:
            piece = "\n".join(lines[begin:index])
            if piece.strip():
                chunks.append(Chunk(len(chunks), begin + 1, index, piece))
            begin, size = index, len(line) + 1
    return chunks
