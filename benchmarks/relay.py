"""How many chunks a second come through, and how soon the first: 20 answers of 500 chunks, as fast as they can.

The official client reads them straight from the chat server (the bare loop), through Sluicegate, and through the
LiteLLM proxy; then a client that costs next to nothing does, for the first text, so that it is not the client's own start
that is timed. One way after another and again: a busy moment of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from benchmarks.chat_paths import LITELLM, ChatPath, chat_server, litellm, sluicegate, straight
from benchmarks.row import Row

STREAMS, CHUNKS, ROUNDS = 20, 500, 4
OF_BARE_TARGET, TIMES_LITELLM_TARGET, TIMES_SOONER_TARGET = 0.75, 5.0, 10.0


def run(database: str) -> list[Row]:
    with chat_server(CHUNKS) as server, contextlib.ExitStack() as open_:
        paths = [open_.enter_context(way(server)) for way in (straight, sluicegate, litellm)]
        measured = [[_measure(path) for path in paths] for _ in range(ROUNDS)]
    bare, ours, theirs = zip(*measured, strict=True)
    return _rows(bare, ours, theirs)


def _measure(path: ChatPath) -> tuple[float, float]:
    """Chunks a second in all, and the median of the seconds to the first text."""
    read = _streams(path, "sdk")
    first_s = statistics.median(stream["first_s"] for stream in _streams(path, "raw"))
    return STREAMS * CHUNKS / max(stream["total_s"] for stream in read), first_s


def _streams(path: ChatPath, reader: str) -> list[dict[str, Any]]:
    streams: list[dict[str, Any]] = path.stream(STREAMS, reader)["streams"]
    for stream in streams:
        assert not stream["error"], f"{path.name}: {stream['error']}"
        assert len(stream["delays_ms"]) == CHUNKS, f"{path.name}: {len(stream['delays_ms'])} chunks came"
    return streams


def _rows(bare: Any, ours: Any, theirs: Any) -> list[Row]:
    name = f"{STREAMS} streams of {CHUNKS} chunks"
    speed, first = [[each[at] for each in ours] for at in (0, 1)]
    of_bare = [mine / yours[0] for mine, yours in zip(speed, bare, strict=True)]
    times = [mine / yours[0] for mine, yours in zip(speed, theirs, strict=True)]
    sooner = [yours[1] / mine for mine, yours in zip(first, theirs, strict=True)]
    return [
        _speed(f"chunks/s, {name}: the official client straight at the server", [each[0] for each in bare]),
        _speed("the same through Sluicegate: worker, Valkey, web", speed),
        _speed(f"the same through the proxy of {LITELLM}", [each[0] for each in theirs]),
        Row("relay", "Sluicegate's share of the bare loop", tuple(of_bare), target=OF_BARE_TARGET),
        Row("relay", "Sluicegate's chunks/s, as a multiple of LiteLLM's", tuple(times), target=TIMES_LITELLM_TARGET),
        _first(
            "seconds to the first text, median of the streams, by a raw client: straight", [each[1] for each in bare]
        ),
        _first("the same through Sluicegate", first),
        _first("the same through LiteLLM", [each[1] for each in theirs]),
        Row("relay", "how many times sooner than through LiteLLM", tuple(sooner), target=TIMES_SOONER_TARGET),
    ]


def _speed(what: str, samples: list[float]) -> Row:
    return Row("relay", what, tuple(samples), decimals=0)


def _first(what: str, samples: list[float]) -> Row:
    return Row("relay", what, tuple(samples), "s")
