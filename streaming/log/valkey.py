"""Connections to the Valkey or Redis that keeps the event logs; the embedded server is started where it is the one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff

from embeddings.runtime import valkey
from embeddings.runtime.valkey import TIMEOUT_S, UNREACHABLE, ensure_server

__all__ = ["UNREACHABLE", "Wire", "connect", "connect_async"]


async def connect_async(timeout_s: float | None = TIMEOUT_S) -> redis.asyncio.Redis:
    """A client with one connection, for one loop; each read and write within `timeout_s`. Raises one of UNREACHABLE."""
    await asyncio.to_thread(ensure_server)
    client = redis.asyncio.Redis.from_url(
        settings.REDIS_URL,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=TIMEOUT_S,
        # Whoever uses a log reconnects by itself, and looks first at what the server has kept.
        retry=AsyncRetry(NoBackoff(), 0),
        single_connection_client=True,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.ping()
    except BaseException:
        await client.aclose()
        raise
    return client


class Wire:
    """One connection that never reconnects behind its user's back: after an error of UNREACHABLE it is over.

    The client itself would go on silently on a new connection, to a server that may have lost what the old one wrote.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._connection = client.connection

    @classmethod
    async def open(cls) -> Wire:
        return cls(await connect_async(timeout_s=None))

    async def send(self, commands: Sequence[tuple[bytes | str | int, ...]]) -> list[Any]:
        """The replies to the commands, sent in one packet; an error reply stands in its place."""
        connection = self._connection
        if connection is None or not connection.is_connected:
            raise redis.ConnectionError("the connection is over")
        replies: list[Any] = []
        # One timeout for all: the client's own, one for each step, swallow a cancellation that comes as a step is done.
        async with asyncio.timeout(TIMEOUT_S):
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                try:
                    replies.append(await connection.read_response())
                except redis.ResponseError as refused:
                    replies.append(refused)
        return replies

    async def ask(self, *command: bytes | str | int) -> Any:
        """The reply to one command. Raises ResponseError where the server refuses it."""
        (reply,) = await self.send([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        await self._client.aclose()


def connect() -> redis.Redis:
    """A blocking client of the caller's own. Raises one of UNREACHABLE."""
    ensure_server()
    return valkey.connect()
