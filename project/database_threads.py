"""ORM calls of processes that wait for much: a few threads with connections of their own, whoever waits (leaf).

The web's loop follows hundreds of logs, and a worker's threads follow hundreds of providers. None of them holds a
connection: their short calls take turns in these threads, those of the request that began first before the others'
(docs/decisions/0012-a-start-is-finished-before-the-next-begins.md).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from django.db import close_old_connections, connection, connections

from project.event_loop import PerLoop

P = ParamSpec("P")
T = TypeVar("T")

# SQLite has one writer, and whoever waits for it sleeps for longer and longer: of each process one thread does.
THREADS = 1 if connection.vendor == "sqlite" else 4
WAITING_THREADS = 64
_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="database")
_waiting_pool = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="waiting")


class _OldestFirst:
    """Room for so many calls of a loop at once; of the tasks that wait, the one that first asked before is next."""

    def __init__(self) -> None:
        self._room = THREADS
        self._numbers = itertools.count()
        self._began: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def __aenter__(self) -> None:
        number, task = next(self._numbers), asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        began = self._began.setdefault(task, number)
        if self._room:
            self._room -= 1
            return
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (began, number, place))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._waiting:
            *_, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._room += 1


_oldest_first = PerLoop(_OldestFirst)


async def in_database(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The call's result, from a thread with a database connection. Short calls only: there are `THREADS` of them."""
    async with _oldest_first():
        return await asyncio.get_running_loop().run_in_executor(_pool, lambda: _with_connection(call, *args, **kwargs))


def in_database_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a thread, which waits for it."""
    return _pool.submit(lambda: _with_connection(call, *args, **kwargs)).result()


async def in_waiting_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a call that waits for a provider. Its thread keeps no connection when it is done."""
    return await asyncio.get_running_loop().run_in_executor(_waiting_pool, lambda: _and_close(call, *args, **kwargs))


def are_in_use() -> bool:
    """Whether any of the threads was ever started."""
    return bool(_pool._threads)


def close_connections() -> None:
    """Closes the connections of the threads, which open new ones when they are asked again."""
    met = threading.Barrier(THREADS)

    def close() -> None:
        connections.close_all()
        # No thread takes a second of these calls before each has had one.
        met.wait()

    for closing in [_pool.submit(close) for _ in range(THREADS)]:
        closing.result()


def _with_connection(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    close_old_connections()
    return call(*args, **kwargs)


def _and_close(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    finally:
        connections.close_all()
