"""What the watchdog costs: the packets of one fast answer, read in a bare loop and as an attempt reads them, in turns.

An attempt reads under `StreamGuard.watch`, and tells its clock of every packet and every chunk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx2

from benchmarks.chat_paths import chat_server
from benchmarks.row import Row
from streaming.upstream.budgets import ChatBudgets
from streaming.upstream.stream_clock import StreamClock
from streaming.upstream.transport import http_client
from streaming.upstream.watchdog import StreamGuard

CHUNKS, ROUNDS = 10_000, 7


def run(database: str) -> list[Row]:
    with chat_server(CHUNKS) as server:
        bare, watched = asyncio.run(_rounds(server))
    share = [mine / theirs for mine, theirs in zip(watched, bare, strict=True)]
    return [
        Row("watchdog", f"packets/s of one stream of {CHUNKS:,}: the bare loop", tuple(bare), decimals=0),
        Row("watchdog", "the same under the watchdog", tuple(watched), decimals=0),
        Row("watchdog", "its share of the bare loop", tuple(share)),
    ]


async def _rounds(server: str) -> tuple[list[float], list[float]]:
    async with http_client() as client:
        await _read(client, server, watched=False)
        rounds = [
            (await _read(client, server, watched=False), await _read(client, server, watched=True))
            for _ in range(ROUNDS)
        ]
    bare, watched = zip(*rounds, strict=True)
    return list(bare), list(watched)


async def _read(client: httpx2.AsyncClient, server: str, *, watched: bool) -> float:
    """Packets a second."""
    async with client.stream("POST", f"{server}/v1/chat/completions", json={"stream": True}) as reply:
        source: AsyncIterator[bytes] = reply.aiter_raw()
        count = 0
        began = time.perf_counter()
        if not watched:
            async for _ in source:
                count += 1
        else:
            clock = StreamClock(ChatBudgets())
            clock.headers_arrived()
            guard = StreamGuard(clock, lambda: None, lambda: False)
            async for _ in guard.watch(source, lambda packet: clock.bytes_arrived(len(packet))):
                count += 1
                clock.chunk_arrived()
                clock.content_arrived()
        return count / (time.perf_counter() - began)
