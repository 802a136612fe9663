"""How many chunks a second come through, and how soon the first: 20 answers of 500 chunks, as fast as they can.

The official client reads them straight from the chat server (the bare loop), through Sluicegate, and through the
LiteLLM proxy, one after another and again, so that a busy moment of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from benchmarks.chat_paths import LITELLM, ChatPath, chat_server, litellm, sluicegate, straight
from benchmarks.row import Row

STREAMS, CHUNKS, ROUNDS = 20, 500, 5
OF_BARE_TARGET, TIMES_LITELLM_TARGET, TIMES_SOONER_TARGET = 0.75, 5.0, 10.0


def run(database: str) -> list[Row]:
    with chat_server(CHUNKS) as server, contextlib.ExitStack() as open_:
        paths = [open_.enter_context(way(server)) for way in (straight, sluicegate, litellm)]
        measured = [[_measure(path) for path in paths] for _ in range(ROUNDS)]
    bare, ours, theirs = zip(*measured, strict=True)
    return _rows(bare, ours, theirs)


def _measure(path: ChatPath) -> tuple[float, float]:
    """Chunks a second in all, and the median of the seconds to the first text."""
    seen: dict[str, Any] = path.stream(STREAMS, "sdk")
    streams = seen["streams"]
    assert not any(stream["error"] for stream in streams), next(s["error"] for s in streams if s["error"])
    chunks = sum(len(stream["delays_ms"]) for stream in streams)
    assert chunks == STREAMS * CHUNKS, f"{path.name}: {chunks} chunks came"
    first_s = statistics.median(stream["first_s"] for stream in streams)
    return chunks / max(stream["total_s"] for stream in streams), first_s


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
        _first("seconds to the first text, median of the streams: straight", [each[1] for each in bare]),
        _first("the same through Sluicegate", first),
        _first("the same through LiteLLM", [each[1] for each in theirs]),
        Row("relay", "how many times sooner than through LiteLLM", tuple(sooner), target=TIMES_SOONER_TARGET),
    ]


def _speed(what: str, samples: list[float]) -> Row:
    return Row("relay", what, tuple(samples), decimals=0)


def _first(what: str, samples: list[float]) -> Row:
    return Row("relay", what, tuple(samples), "s")
