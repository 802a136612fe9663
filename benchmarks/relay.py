"""Chunks a second, and seconds to the first text: 20 answers of 500 chunks, sent as fast as possible.

The official client reads them directly from the chat server (the bare loop), through Sluicegate, and through the LiteLLM
proxy. The first text is timed with a raw client, so that the official client's own start is not measured. The paths take
turns, so that a busy moment of the machine does not affect only one of them.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chat_paths import LITELLM, ChatPath, chat_server, litellm, sluicegate, straight
from benchmarks.row import Row

STREAMS, CHUNKS, ROUNDS = 20, 500, 4
OF_BARE_TARGET, TIMES_LITELLM_TARGET, TIMES_SOONER_TARGET = 0.75, 5.0, 10.0


@dataclass(frozen=True)
class Measured:
    """Chunks a second of all streams together, and the median of the seconds to the first text."""

    chunks_per_s: float
    first_s: float


def run(database: str) -> list[Row]:
    with chat_server(CHUNKS) as server, contextlib.ExitStack() as open_:
        paths = [open_.enter_context(way(server)) for way in (straight, sluicegate, litellm)]
        measured = [[_measure(path) for path in paths] for _ in range(ROUNDS)]
    bare, ours, theirs = zip(*measured, strict=True)
    return _rows(bare, ours, theirs)


def _measure(path: ChatPath) -> Measured:
    read = _streams(path, "sdk")
    first_s = statistics.median(stream["first_s"] for stream in _streams(path, "raw"))
    return Measured(STREAMS * CHUNKS / max(stream["total_s"] for stream in read), first_s)


def _streams(path: ChatPath, reader: str) -> list[dict[str, Any]]:
    streams: list[dict[str, Any]] = path.stream(STREAMS, reader)["streams"]
    for stream in streams:
        assert not stream["error"], f"{path.name}: {stream['error']}"
        assert len(stream["delays_ms"]) == CHUNKS, f"{path.name}: {len(stream['delays_ms'])} chunks came"
    return streams


def _rows(bare: Sequence[Measured], ours: Sequence[Measured], theirs: Sequence[Measured]) -> list[Row]:
    name = f"{STREAMS} streams of {CHUNKS} chunks"
    of_bare = [mine.chunks_per_s / yours.chunks_per_s for mine, yours in zip(ours, bare, strict=True)]
    times = [mine.chunks_per_s / yours.chunks_per_s for mine, yours in zip(ours, theirs, strict=True)]
    sooner = [yours.first_s / mine.first_s for mine, yours in zip(ours, theirs, strict=True)]
    return [
        _speed(f"chunks/s, {name}: the official client straight at the server", bare),
        _speed("the same through Sluicegate: worker, Valkey, web", ours),
        _speed(f"the same through the proxy of {LITELLM}", theirs),
        Row("relay", "Sluicegate's share of the bare loop", tuple(of_bare), target=OF_BARE_TARGET),
        Row("relay", "Sluicegate's chunks/s, as a multiple of LiteLLM's", tuple(times), target=TIMES_LITELLM_TARGET),
        _first("seconds to the first text, median of the streams, by a raw client: straight", bare),
        _first("the same through Sluicegate", ours),
        _first("the same through LiteLLM", theirs),
        Row("relay", "how many times sooner than through LiteLLM", tuple(sooner), target=TIMES_SOONER_TARGET),
    ]


def _speed(what: str, rounds: Sequence[Measured]) -> Row:
    return Row("relay", what, tuple(each.chunks_per_s for each in rounds), decimals=0)


def _first(what: str, rounds: Sequence[Measured]) -> Row:
    return Row("relay", what, tuple(each.first_s for each in rounds), "s")
