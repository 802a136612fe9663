"""The mutations of a process that carries many streams: how their packets are read, and who gives way to whom."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CONNECTIONS = "tests/streaming/upstream/test_connections.py"
BATCH_PAUSE = f"{CONNECTIONS}::TestGathering"
GIVING_WAY = "tests/streaming/turns/test_fairness.py"
THREADS = "tests/project/runtime/test_database_threads.py"
OPENAI = "tests/streaming/http/test_openai_client.py"
BELLS = "tests/streaming/turns/test_turn_processes.py"

CONNECTION_MUTATIONS = (
    # --- connections --------------------------------------------------------------------------------------------------
    Mutation(
        "every packet is read by itself, however many streams there are",
        "-",
        "streaming/upstream/connections.py",
        "            due = self._read_at + gather_s(len(_waiting))\n",
        "            due = self._read_at\n",
        (BATCH_PAUSE,),
    ),
    Mutation(
        "few streams have to share their reads too",
        "-",
        "streaming/upstream/connections.py",
        "    return min(share, GATHER_MOST_S) if share > GATHER_LEAST_S else 0.0\n",
        "    return min(share, GATHER_MOST_S)\n",
        (BATCH_PAUSE,),
    ),
    Mutation(
        "a stream of thousands is read as seldom as its share says",
        "G10",
        "streaming/upstream/connections.py",
        "    return min(share, GATHER_MOST_S) if share > GATHER_LEAST_S else 0.0\n",
        "    return share if share > GATHER_LEAST_S else 0.0\n",
        (BATCH_PAUSE,),
    ),
    Mutation(
        "a reply's first reads are gathered too",
        "-",
        "streaming/upstream/connections.py",
        "self.reads >= FIRST_READS and ",
        "",
        (BATCH_PAUSE,),
    ),
    Mutation(
        "a flood is gathered too",
        "-",
        "streaming/upstream/connections.py",
        "len(self.unread) < GATHERED_BYTES_MAX and ",
        "",
        (BATCH_PAUSE,),
    ),
    Mutation(
        "what was gathered is read only once more comes",
        "G10",
        "streaming/upstream/connections.py",
        "                self._timer = self._loop.call_at(due, self._wake_reader)\n",
        "                pass\n",
        (BATCH_PAUSE,),
    ),
    Mutation(
        "a peer may send more than is ever read",
        "-",
        "streaming/upstream/connections.py",
        "            self.transport.pause_reading()\n",
        "            pass\n",
        (CONNECTIONS, "-k", "has_to_wait"),
    ),
    Mutation(
        "an abort waits until everything was sent",
        "G10",
        "streaming/upstream/connections.py",
        "            self.transport.abort()\n",
        "            self.transport.close()\n",
        (CONNECTIONS, "-k", "abort"),
    ),
    # --- giving way ---------------------------------------------------------------------------------------------------
    Mutation(
        "a flood gives way to nobody",
        "-",
        "streaming/turns/fairness.py",
        "PAUSE_S if is_starting else 0",
        "0",
        (GIVING_WAY,),
    ),
    Mutation(
        "a flood always gives way",
        "-",
        "streaming/turns/fairness.py",
        "PAUSE_S if is_starting else 0",
        "PAUSE_S",
        (GIVING_WAY,),
    ),
    Mutation(
        "a new request starts before one that has begun",
        "-",
        "project/runtime/database_threads.py",
        "(began, number, place)",
        "(number, began, place)",
        (THREADS,),
    ),
    Mutation(
        "the place of a cancelled waiter is lost",
        "-",
        "project/runtime/database_threads.py",
        "            if not place.cancelled():\n                self._leave()\n",
        "            pass\n",
        (THREADS,),
    ),
    Mutation(
        "a broker that says nothing holds a start up",
        "-",
        "embeddings/runtime/wake_ups.py",
        "timeout=_WAIT_S",
        "timeout=None",
        (BELLS, "-k", "says_nothing"),
    ),
    Mutation(
        "more is waited for of a body that is over",
        "-",
        "project/bounded_bodies.py",
        "            if too_large.has_more:\n",
        "            if too_large:\n",
        (OPENAI, "-k", "too_large_and"),
    ),
    Mutation(
        "a record is kept of every wake-up",
        "-",
        "project/settings.py",
        '"chat": {"no_ack": True}',
        '"chat": {}',
        (BELLS, "-k", "record"),
    ),
    Mutation(
        "every wake-up is acknowledged",
        "-",
        "streaming/turns/wake_ups.py",
        "acknowledged = True",
        "acknowledged = False",
        (BELLS, "-k", "record"),
    ),
    Mutation(
        "nobody is told of a start",
        "-",
        "streaming/tasks.py",
        "    fairness.note_start()\n",
        "    pass\n",
        (GIVING_WAY,),
    ),
)
