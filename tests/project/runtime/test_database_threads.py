"""The threads with database connections: who waits for one, and who is next."""

import asyncio
import contextlib
import threading

import pytest
from django.db import connection

from project.runtime import database_threads
from project.runtime.database_threads import in_database, in_line
from tests.support.waiting import PROMPTLY_S


class Request:
    """A task that stands in line twice, the second time when it is told to."""

    def __init__(self, name, heard):
        self.has_begun, self.again = asyncio.Event(), asyncio.Event()
        self._name, self._heard = name, heard

    async def run(self):
        await in_line(lambda: None)
        self.has_begun.set()
        await self.again.wait()
        await in_line(self._heard.append, self._name)


@contextlib.asynccontextmanager
async def full_line():
    release = threading.Event()
    holding = [asyncio.create_task(in_line(release.wait)) for _ in range(database_threads.LINE_THREADS)]
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
    async with full_line():
        for name in asking_again:
            requests[name].again.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return heard


def test_the_request_that_began_first_is_next(monkeypatch):
    monkeypatch.setattr(database_threads, "LINE_THREADS", 1)
    assert bounded(order_of("abc", asking_again="cab")) == ["a", "b", "c"]


def test_whoever_asks_for_the_first_time_comes_after_those_that_have_begun(monkeypatch):
    monkeypatch.setattr(database_threads, "LINE_THREADS", 1)

    async def scenario():
        heard = []
        older = Request("older", heard)
        begun = asyncio.create_task(older.run())
        await older.has_begun.wait()
        async with full_line():
            new = asyncio.create_task(in_line(heard.append, "new"))
            await asyncio.sleep(0)
            older.again.set()
            await asyncio.sleep(0)
        await asyncio.gather(begun, new)
        return heard

    assert bounded(scenario()) == ["older", "new"]


def test_a_full_line_holds_up_nothing_but_itself():
    async def scenario():
        async with full_line():
            return await in_database(lambda: "answered")

    assert bounded(scenario()) == "answered"


@pytest.mark.both_databases
def test_sqlite_which_has_one_writer_has_a_line_of_one():
    assert (1 if connection.vendor == "sqlite" else 2) == database_threads.LINE_THREADS


def test_one_that_gives_up_waiting_leaves_its_place_to_the_next():
    async def scenario():
        heard = []
        async with full_line():
            tired = asyncio.create_task(in_line(heard.append, "tired"))
            patient = asyncio.create_task(in_line(heard.append, "patient"))
            await asyncio.sleep(0)
            tired.cancel()
        await asyncio.gather(tired, patient, return_exceptions=True)
        async with full_line():
            pass
        return heard

    assert bounded(scenario()) == ["patient"]


def test_one_that_gives_up_in_the_moment_it_is_given_a_place_hands_it_on():
    async def scenario():
        places = database_threads._Line()
        for _ in range(database_threads.LINE_THREADS):
            await places.__aenter__()
        waiting = asyncio.create_task(places.__aenter__())
        await asyncio.sleep(0)
        await places.__aexit__()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await places.__aenter__()

    bounded(scenario())
