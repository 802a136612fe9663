"""This process's blocking connection to Valkey or Redis; the embedded server is started where it is the one."""

from __future__ import annotations

import os

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from project.runtime.embedded import EmbeddedValkeyError, hold_valkey

# What a caller may see while the server is away.
UNREACHABLE = (redis.RedisError, OSError, EmbeddedValkeyError)
TIMEOUT_S = 5.0

_clients: dict[int, redis.Redis] = {}


def ensure_server() -> None:
    """Starts the embedded server if it is the one and none runs; cheap to call again. Raises EmbeddedValkeyError."""
    if settings.EMBEDDED_VALKEY:
        hold_valkey(settings.VAR_DIR)


def client() -> redis.Redis:
    """The client that this process's threads share; a forked child makes its own. Raises one of UNREACHABLE."""
    ensure_server()
    found = _clients.get(os.getpid())
    if found is None:
        found = _clients[os.getpid()] = connect()
    return found


def connect() -> redis.Redis:
    """A client of the caller's own."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        protocol=2,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        # Callers look at the rows first, and decide themselves when to try again.
        retry=Retry(NoBackoff(), 0),
    )
