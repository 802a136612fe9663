"""Connections to the Valkey or Redis that keeps the event logs; the embedded server is started where it is used."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff

from embeddings.runtime import valkey
from embeddings.runtime.valkey import TIMEOUT_S, UNREACHABLE, ensure_server

__all__ = ["TIMEOUT_S", "UNREACHABLE", "connect", "connect_async", "connect_once"]


async def connect_async(timeout_s: float | None = TIMEOUT_S, **options: Any) -> redis.asyncio.Redis:
    """A client of one connection, for one loop; each read and write within `timeout_s`. Raises one of UNREACHABLE."""
    await asyncio.to_thread(ensure_server)
    client = redis.asyncio.Redis.from_url(
        settings.REDIS_URL,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=TIMEOUT_S,
        # The callers reconnect themselves, and first read what the server has kept.
        retry=AsyncRetry(NoBackoff(), 0),
        max_connections=1,
        **options,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.ping()
    except (*UNREACHABLE, asyncio.CancelledError):
        await client.aclose()
        raise
    return client


async def connect_once() -> redis.asyncio.Redis:
    """A client that never reconnects: after an error of UNREACHABLE every command raises one. Raises one of UNREACHABLE.

    By itself it would reconnect silently, perhaps to a server that has lost what was written before. Its reads have no time
    limit: redis-py's own, one for each step, may swallow a cancellation, so that callers set one of asyncio's.
    """
    has_connected = False

    async def connect_only_once(connection: Any) -> None:
        nonlocal has_connected
        if has_connected:
            raise redis.ConnectionError("the connection is over")
        has_connected = True
        await connection.on_connect()

    return await connect_async(timeout_s=None, redis_connect_func=connect_only_once)


def connect() -> redis.Redis:
    """A blocking client of the caller's own. Raises one of UNREACHABLE."""
    ensure_server()
    return valkey.connect()
