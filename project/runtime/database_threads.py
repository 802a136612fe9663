"""ORM calls of processes that wait for much: a few threads with connections of their own, whoever waits (leaf).

The web's loop follows hundreds of logs, and a worker's threads follow hundreds of providers. None of them holds a
connection: their short calls take turns in these threads. What starts and ends turns stands in line
(docs/decisions/0012-a-start-is-finished-before-the-next-begins.md); what asks somebody else than the database, and may
wait for an answer, has threads of its own.
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

from project.runtime.event_loop import PerLoop

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
# SQLite has one writer, and whoever waits for it sleeps for longer and longer: of each process one thread does. Elsewhere one
# works while the other waits for the server; more would only take the interpreter from the starts before theirs.
LINE_THREADS = 1 if connection.vendor == "sqlite" else 2
WAITING_THREADS = 64
_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="database")
_line_pool = ThreadPoolExecutor(LINE_THREADS, thread_name_prefix="line")
_waiting_pool = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="waiting")


async def in_database(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The call's result, from a thread with a database connection. Short calls only: there are `THREADS` of them."""
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: _with_connection(call, *args, **kwargs))


async def in_line(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for what starts a turn. Of the tasks that wait, the one that was the first to stand in line is next."""
    async with _line():
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_line_pool, lambda: _with_connection(call, *args, **kwargs))


def in_line_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a thread, which waits for it: first come, first served."""
    return _line_pool.submit(lambda: _with_connection(call, *args, **kwargs)).result()


async def in_waiting_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a call that waits for somebody else, too. Its thread keeps no connection when it is done."""
    return await asyncio.get_running_loop().run_in_executor(_waiting_pool, lambda: _and_close(call, *args, **kwargs))


def close_connections() -> None:
    """Closes the connections of the threads, which open new ones when they are asked again."""
    for pool, threads in ((_pool, THREADS), (_line_pool, LINE_THREADS)):
        if pool._threads:
            _close_connections(pool, threads)


def _close_connections(pool: ThreadPoolExecutor, threads: int) -> None:
    met = threading.Barrier(threads)

    def close() -> None:
        connections.close_all()
        # No thread takes a second of these calls before each has had one.
        met.wait()

    for closing in [pool.submit(close) for _ in range(threads)]:
        closing.result()


def _with_connection(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    close_old_connections()
    return call(*args, **kwargs)


def _and_close(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    finally:
        connections.close_all()


class _Line:
    """Room for so many calls of a loop at once; of the tasks that wait, the one that first stood here is next."""

    def __init__(self) -> None:
        self._room = LINE_THREADS
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


_line = PerLoop(_Line)
