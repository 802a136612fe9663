"""Executors that bound a process's database connections (leaf).

The web process follows hundreds of event logs and a worker hundreds of provider calls; neither holds a connection while
it waits. Each kind of ORM call has an executor of its own, so that a slow kind never delays another:

* `in_database`: short reads and writes, in a few threads that keep their connections;
* `in_fifo`: the calls that start and end turns; the oldest request first
  (docs/decisions/0012-a-start-is-finished-before-the-next-begins.md has the measurements);
* `in_waiting_thread`: calls that also wait for Valkey, the broker or a provider.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from django.db import close_old_connections, connection, connections

from project.runtime.error_place import place_of
from project.runtime.event_loop import PerLoop

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
# SQLite has one writer, and a connection that waits for its lock sleeps longer after each attempt: so one thread per process.
# On PostgreSQL one thread works while the other waits for the server; more would compete with older starts for the GIL.
FIFO_THREADS = 1 if connection.vendor == "sqlite" else 2
WAITING_THREADS = 64
_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="database")
_fifo_pool = ThreadPoolExecutor(FIFO_THREADS, thread_name_prefix="fifo")
_waiting_pool = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="waiting")


async def in_database(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The call's result, from a thread with a database connection. Short calls only: there are `THREADS` of them."""
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: _with_connection(call, *args, **kwargs))


async def in_fifo(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for calls that start a turn. A task keeps its place: its second call precedes the first of newer tasks."""
    async with _fifo_places():
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_fifo_pool, lambda: _with_connection(call, *args, **kwargs))


def in_fifo_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for synchronous code, which blocks until its call is done."""
    return _fifo_pool.submit(lambda: _with_connection(call, *args, **kwargs)).result()


async def in_waiting_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a call that also waits for another server. Its connections are closed when it returns."""
    return await asyncio.wrap_future(_waiting_pool.submit(lambda: _call_and_close(call, *args, **kwargs)))


def in_background(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Starts such a call and does not wait for it; an error of it is logged."""
    _waiting_pool.submit(lambda: _call_and_close(call, *args, **kwargs)).add_done_callback(_log_error)


def _call_and_close(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    finally:
        connections.close_all()


def _log_error(future: Future[object]) -> None:
    if (error := future.exception()) is not None:
        logger.error("a call in the background failed: %s", place_of(error))


def close_connections() -> None:
    """Closes the connections of both executors' threads, which open new ones at their next call."""
    for pool, threads in ((_pool, THREADS), (_fifo_pool, FIFO_THREADS)):
        if not pool._threads:
            continue
        # Each thread waits until all have closed theirs: otherwise one thread could take two of these calls.
        met = threading.Barrier(threads)

        def close(met: threading.Barrier = met) -> None:
            connections.close_all()
            met.wait()

        for closing in [pool.submit(close) for _ in range(threads)]:
            closing.result()


def _with_connection(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    close_old_connections()
    return call(*args, **kwargs)


class _FifoPlaces:
    """A semaphore of `FIFO_THREADS` places. Its waiters are ordered by their tasks' first call."""

    def __init__(self) -> None:
        self._free = FIFO_THREADS
        self._numbers = itertools.count()
        self._began: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def __aenter__(self) -> None:
        number, task = next(self._numbers), asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        began = self._began.setdefault(task, number)
        if self._free:
            self._free -= 1
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
        self._free += 1


_fifo_places = PerLoop(_FifoPlaces)
