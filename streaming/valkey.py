"""Connections to the Valkey or Redis that keeps the event logs; the embedded server is started where it is the one."""

from __future__ import annotations

import asyncio

import redis
import redis.asyncio
from django.conf import settings
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from project.embedded import EmbeddedValkeyError, hold_valkey

# What a caller may see while the server is away.
UNREACHABLE = (RedisError, OSError, EmbeddedValkeyError, asyncio.TimeoutError)
_TIMEOUT_S = 5.0


async def connect_async() -> redis.asyncio.Redis:
    """A client with one connection, for one loop. Raises one of UNREACHABLE."""
    await asyncio.to_thread(_ensure_server)
    client = redis.asyncio.Redis.from_url(
        settings.REDIS_URL,
        protocol=2,
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        # Whoever uses a log reconnects by itself, and looks first at what the server has kept.
        retry=AsyncRetry(NoBackoff(), 0),
        single_connection_client=True,
    )
    try:
        await client.ping()
    except BaseException:
        await client.aclose()
        raise
    return client


def connect() -> redis.Redis:
    """A blocking client. Raises one of UNREACHABLE."""
    _ensure_server()
    return redis.Redis.from_url(
        settings.REDIS_URL,
        protocol=2,
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )


def _ensure_server() -> None:
    if settings.EMBEDDED_VALKEY:
        hold_valkey(settings.VAR_DIR)
