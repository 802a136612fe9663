"""What the watchdog costs: the packets of one fast answer, read under it and without it, in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx2

from benchmarks.chat_paths import chat_server
from benchmarks.row import Row
from streaming.upstream.transport import http_client
from streaming.upstream.watchdog import with_stream_inactivity_timeout

CHUNKS, ROUNDS = 10_000, 7
_IDLE_MS = 120_000


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
        if watched:
            source = with_stream_inactivity_timeout(source, _IDLE_MS, lambda: None, lambda: False)
        began, count = time.perf_counter(), 0
        async for _ in source:
            count += 1
        return count / (time.perf_counter() - began)
