"""ORM calls from the web's loop: a few threads, so that the connections of a process are few, whoever waits (leaf)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from django.db import close_old_connections, connections

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 8
WAITING_THREADS = 64
_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="database")
_waiting_pool = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="waiting")


async def in_database(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The call's result, from a thread with a database connection. Short calls only: there are `THREADS` of them."""

    def guarded() -> T:
        close_old_connections()
        return call(*args, **kwargs)

    return await asyncio.get_running_loop().run_in_executor(_pool, guarded)


async def in_waiting_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a call that waits for a provider. Its thread keeps no connection when it is done."""

    def guarded() -> T:
        try:
            return call(*args, **kwargs)
        finally:
            connections.close_all()

    return await asyncio.get_running_loop().run_in_executor(_waiting_pool, guarded)
