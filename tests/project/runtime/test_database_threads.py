"""The executors with database connections: which call waits for which."""

import asyncio
import contextlib
import threading

import pytest
from django.db import connection

from project.runtime import database_threads
from project.runtime.database_threads import in_database, in_fifo, in_waiting_thread
from tests.support.waiting import PROMPTLY_S


class Request:
    """A task that makes two FIFO calls, the second one when `again` is set."""

    def __init__(self, name, heard):
        self.has_begun, self.again = asyncio.Event(), asyncio.Event()
        self._name, self._heard = name, heard

    async def run(self):
        await in_fifo(lambda: None)
        self.has_begun.set()
        await self.again.wait()
        await in_fifo(self._heard.append, self._name)


@contextlib.asynccontextmanager
async def full_fifo():
    release = threading.Event()
    holding = [asyncio.create_task(in_fifo(release.wait)) for _ in range(database_threads.FIFO_THREADS)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        release.set()
        await asyncio.gather(*holding)


def bounded(scenario):
    async def run():
        async with asyncio.timeout(PROMPTLY_S):
            return await scenario

    return asyncio.run(run())


async def order_of(names, *, asking_again):
    heard = []
    requests = {name: Request(name, heard) for name in names}
    tasks = []
    for request in requests.values():
        tasks.append(asyncio.create_task(request.run()))
        await request.has_begun.wait()
    async with full_fifo():
        for name in asking_again:
            requests[name].again.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return heard


def test_the_oldest_request_is_next(monkeypatch):
    monkeypatch.setattr(database_threads, "FIFO_THREADS", 1)
    assert bounded(order_of("abc", asking_again="cab")) == ["a", "b", "c"]


def test_a_new_request_comes_after_those_that_have_begun(monkeypatch):
    monkeypatch.setattr(database_threads, "FIFO_THREADS", 1)

    async def scenario():
        heard = []
        older = Request("older", heard)
        begun = asyncio.create_task(older.run())
        await older.has_begun.wait()
        async with full_fifo():
            new = asyncio.create_task(in_fifo(heard.append, "new"))
            await asyncio.sleep(0)
            older.again.set()
            await asyncio.sleep(0)
        await asyncio.gather(begun, new)
        return heard

    assert bounded(scenario()) == ["older", "new"]


def test_a_full_fifo_delays_no_other_executor():
    async def scenario():
        async with full_fifo():
            return await in_database(lambda: "read"), await in_waiting_thread(lambda: "waited")

    assert bounded(scenario()) == ("read", "waited")


@pytest.mark.both_databases
def test_sqlite_which_has_one_writer_has_one_fifo_thread():
    assert (1 if connection.vendor == "sqlite" else 2) == database_threads.FIFO_THREADS


def test_a_cancelled_waiter_is_skipped():
    async def scenario():
        heard = []
        async with full_fifo():
            cancelled = asyncio.create_task(in_fifo(heard.append, "cancelled"))
            following = asyncio.create_task(in_fifo(heard.append, "following"))
            await asyncio.sleep(0)
            cancelled.cancel()
        await asyncio.gather(cancelled, following, return_exceptions=True)
        async with full_fifo():
            pass
        return heard

    assert bounded(scenario()) == ["following"]


def test_a_waiter_cancelled_as_it_gets_its_place_passes_it_on():
    async def scenario():
        places = database_threads._FifoPlaces()
        for _ in range(database_threads.FIFO_THREADS):
            await places.__aenter__()
        waiting = asyncio.create_task(places.__aenter__())
        await asyncio.sleep(0)
        await places.__aexit__()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await places.__aenter__()

    bounded(scenario())
