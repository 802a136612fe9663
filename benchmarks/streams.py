"""Many streams at once at a model's pace: 200 streams of 20 chunks a second, all of them open for a minute.

They start one after another over twenty seconds. Every chunk holds the time at which it was sent, from which the client
computes its delay. Client and server use as little CPU as they can, to leave the two cores to the path that is measured.
Streams that have not ended ten seconds after the last one was due are abandoned.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any

from benchmarks.chat_paths import LITELLM, ChatPath, chat_server, litellm, sluicegate, straight
from benchmarks.row import Row
from streaming.models import ChatAttempt

STREAMS, PER_SECOND, TOGETHER_S, OVER_S = 200, 20, 60, 20
P99_TARGET_MS = 250.0
_EACH_S = OVER_S + TOGETHER_S
_ABANDON_AFTER_S = OVER_S + _EACH_S + 10
# When memory is read: every stream is open then.
_MEMORY_READ_AT_S = OVER_S + TOGETHER_S / 2


@dataclass(frozen=True)
class Measured:
    """`delays_ms` is sorted; `whole` is the number of streams that ended with every chunk."""

    delays_ms: list[float]
    whole: int
    cores: float
    memory_mb: float

    def percentile(self, share: float) -> float:
        return self.delays_ms[int(share * (len(self.delays_ms) - 1))] if self.delays_ms else float("nan")


def run(database: str) -> list[Row]:
    chunks = PER_SECOND * _EACH_S
    with chat_server(chunks, 1 / PER_SECOND) as server:
        found = {}
        for name, way in (("straight", straight), ("Sluicegate", sluicegate), ("LiteLLM", litellm)):
            with way(server) as path:
                found[name] = _measure(path, chunks)
    false_timeouts = ChatAttempt.objects.exclude(end_state__in=("completed", "cancelled")).count()
    return [row for name, each in found.items() for row in _rows(name, each)] + [
        Row(
            "streams",
            "attempts that ended neither completed nor by their client",
            (false_timeouts,),
            "",
            0,
            "exactly",
            0,
        )
    ]


def _measure(path: ChatPath, chunks: int) -> Measured:
    before_s, before_mb = path.usage()
    during_mb: list[float] = []
    memory_reader = threading.Timer(_MEMORY_READ_AT_S, lambda: during_mb.append(path.usage()[1]))
    memory_reader.start()
    seen: dict[str, Any] = path.stream(STREAMS, "raw", OVER_S, _ABANDON_AFTER_S)
    memory_reader.join()
    delays = [stream["delays_ms"] for stream in seen["streams"]]
    return Measured(
        sorted(itertools.chain.from_iterable(delays)),
        sum(len(each) == chunks and not stream["error"] for each, stream in zip(delays, seen["streams"], strict=True)),
        (path.usage()[0] - before_s) / seen["seconds"],
        during_mb[0] - before_mb,
    )


def _rows(name: str, each: Measured) -> list[Row]:
    ours = name == "Sluicegate"
    through = {"straight": "straight", "LiteLLM": f"through {LITELLM}"}.get(name, f"through {name}")
    p99 = (round(each.percentile(0.99), 1),)
    rows = [
        Row(
            "streams",
            f"{STREAMS} streams at {PER_SECOND} chunks/s, {TOGETHER_S} s together, {through}: whole answers",
            (each.whole,),
            target=STREAMS if ours else None,
            decimals=0,
        ),
        Row("streams", "the same: delay of a chunk, median", (each.percentile(0.5),), "ms", decimals=0),
        Row("streams", "the same: p99", p99, "ms", P99_TARGET_MS if ours else None, "at most", 0),
    ]
    if name == "straight":
        return rows
    return [
        *rows,
        Row("streams", "the same: cores in use, web and worker", (each.cores,)),
        Row("streams", "the same: memory for each stream", (each.memory_mb / STREAMS * 1000,), "kB", decimals=0),
    ]
