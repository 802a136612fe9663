"""A bulkhead: so many threads for one kind of work, and no backlog of wake-ups for the same work."""

import queue
import threading

import pytest
from django.db import DEFAULT_DB_ALIAS, connection, connections

from embeddings.runtime.bulkheads import Bulkhead
from tests.support.waiting import eventually


@pytest.fixture
def bulkhead():
    made = Bulkhead("test", 2)
    yield made
    made.end()


@pytest.fixture
def gate():
    opened = threading.Event()
    yield opened
    opened.set()


def fill(bulkhead, gate):
    """Holds both threads until the gate is opened."""
    at_work = threading.Semaphore(0)
    for _ in range(2):
        bulkhead.put(lambda: (at_work.release(), gate.wait(20)))
    for _ in range(2):
        assert at_work.acquire(timeout=20)


def test_work_of_a_key_waits_once(bulkhead, gate):
    fill(bulkhead, gate)
    done = []
    for key in ("a", "b", "a", "a"):
        bulkhead.wake(key, lambda key=key: done.append(key))
    assert done == []
    gate.set()
    eventually(lambda: sorted(done) == ["a", "b"])


def test_a_wake_up_that_comes_during_the_work_is_not_lost(bulkhead, gate):
    """The work may have looked at the rows before they changed."""
    begun, ended = threading.Event(), []
    bulkhead.wake("a", lambda: (begun.set(), gate.wait(20), ended.append(1)))
    assert begun.wait(20)
    bulkhead.wake("a", lambda: ended.append(2))
    gate.set()
    eventually(lambda: sorted(ended) == [1, 2])


def test_what_work_raises_ends_that_work_alone(bulkhead, caplog):
    done = []
    bulkhead.wake("a", lambda: 1 / 0)
    bulkhead.wake("b", lambda: done.append("b"))
    eventually(lambda: done == ["b"])
    eventually(lambda: "a piece of work failed: test" in caplog.text)


def test_its_end_waits_for_what_is_at_work_and_drops_what_waits(bulkhead, gate):
    fill(bulkhead, gate)
    done = []
    bulkhead.wake("a", lambda: done.append("a"))
    ending = threading.Thread(target=bulkhead.end)
    ending.start()
    eventually(lambda: bulkhead._pool is None)
    gate.set()
    ending.join(20)
    assert (ending.is_alive(), done) == (False, [])


@pytest.mark.both_databases
@pytest.mark.parametrize("keeps", [True, False])
def test_its_threads_keep_no_connection_unless_they_are_to(transactional_db, keeps):
    """Pieces of a drain follow each other within milliseconds; a round comes every few seconds."""
    bulkhead = Bulkhead("test", 1, keeps_connections=keeps)
    seen = []
    for _ in range(2):
        bulkhead.put(lambda: seen.append((connection.connection, connection.cursor().close())))
    eventually(lambda: len(seen) == 2)
    assert seen[0][0] is None
    assert (seen[1][0] is not None) == keeps
    bulkhead.put(connection.close)
    bulkhead.end()


@pytest.mark.both_databases
def test_its_end_closes_every_kept_connection(transactional_db, gate):
    """That of a thread which is still at work when the end is asked for as well."""
    keeping, opened = Bulkhead("keeping", 2, keeps_connections=True), queue.Queue()

    def open_connection():
        connection.ensure_connection()
        opened.put(connections[DEFAULT_DB_ALIAS])
        gate.wait(20)

    keeping.put(open_connection)
    kept = opened.get(timeout=20)
    ending = threading.Thread(target=keeping.end)
    ending.start()
    eventually(lambda: keeping.has_ended)
    assert kept.connection is not None
    gate.set()
    ending.join(20)
    assert kept.connection is None
