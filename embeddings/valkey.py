"""This process's connection to Valkey or Redis."""

from __future__ import annotations

import os

import redis
from django.conf import settings

_clients: dict[int, redis.Redis] = {}


def client() -> redis.Redis:
    """A client of this process; a forked child makes its own."""
    found = _clients.get(os.getpid())
    if found is None:
        found = _clients[os.getpid()] = redis.Redis.from_url(
            settings.REDIS_URL, socket_connect_timeout=2, socket_timeout=10
        )
    return found
