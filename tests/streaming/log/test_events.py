"""The event log against a real Valkey: order, joining, restarts, fences, many readers on one connection."""

import asyncio
import time
import uuid

import pytest
from django.conf import settings

from project.runtime.embedded import ensure_valkey
from streaming.log import events, valkey
from streaming.log import reader as reader_module
from streaming.log.reader import BACKLOG, SHARE, EventReader
from streaming.log.recorder import Recorder
from streaming.log.writer import EventWriter
from streaming.models import ChatTurn
from streaming.states import TurnState
from streaming.turns import orphaned_turns
from streaming.turns.transitions import Ending
from streaming.upstream.deltas import ChatDelta
from tests.support.waiting import PROMPTLY_S, eventually

NOW = 5.0


@pytest.fixture(scope="module", autouse=True)
def log_server():
    with ensure_valkey(settings.VAR_DIR):
        yield


@pytest.fixture
def client():
    with valkey.connect() as connection:
        yield connection


def new_log(writer):
    return writer.open(7, uuid.uuid4())


async def read_all(reader, key, after=0):
    """The events from `after` to the end."""
    came = []
    with reader.subscribe(key, after) as subscription:
        while not (came and came[-1].is_end):
            taken = await subscription.take(NOW)
            assert taken, f"nothing more came after {came}"
            came += taken
    return came


def say(log, text, attempt=1):
    log.append(events.DELTA, attempt, {"choice": 0, "offset": 0, "delta": {"content": text}})


def texts(came):
    return [event.data["delta"]["content"] for event in came if event.type == events.DELTA]


def test_what_was_appended_is_read_in_order_by_readers_before_and_after():
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        log = new_log(writer)
        early = asyncio.create_task(read_all(reader, log.key))
        log.append(events.START, 0, {"model": "m"})
        for number in range(300):
            say(log, str(number))
        assert await log.close(1, {"state": "completed"}, NOW)
        late = await read_all(reader, log.key)
        assert await early == late
        assert texts(late) == [str(number) for number in range(300)]
        assert [event.seq for event in late] == [*range(1, 302), events.END_SEQ]
        assert late[-1].data == {"state": "completed", "entries": 301}
        assert await read_all(reader, log.key, after=290) == late[290:]

    asyncio.run(scenario())


def test_a_reader_that_waits_hears_of_a_new_subscription_beside_it_at_once(monkeypatch):
    monkeypatch.setattr(reader_module, "BLOCK_MS", 20_000)

    async def scenario():
        writer, reader = EventWriter(), EventReader()
        silent, busy = new_log(writer), new_log(writer)
        with reader.subscribe(silent.key) as waiting:
            await waiting.take(0.1)
            begun = time.monotonic()
            say(busy, "hello")
            with reader.subscribe(busy.key) as subscription:
                assert texts(await subscription.take(NOW)) == ["hello"]
            # Without the wake-up it would wait for the end of the blocking read.
            assert time.monotonic() - begun < PROMPTLY_S

    asyncio.run(scenario())


def test_without_the_wake_up_it_waits_for_the_blocking_read(monkeypatch):
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        monkeypatch.setattr(reader, "restart_read", lambda: None)
        silent, busy = new_log(writer), new_log(writer)
        with reader.subscribe(silent.key) as waiting:
            await waiting.take(0.1)
            begun = time.monotonic()
            say(busy, "hello")
            with reader.subscribe(busy.key) as subscription:
                assert texts(await subscription.take(NOW)) == ["hello"]
            assert time.monotonic() - begun > 0.5

    asyncio.run(scenario())


def test_a_slow_reader_is_left_out_and_loses_nothing():
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        log, other = new_log(writer), new_log(writer)
        for number in range(1_000):
            say(log, str(number))
        with reader.subscribe(log.key) as slow:
            came = texts(await slow.take(NOW))
            # It takes nothing more for a while; the others read on.
            assert len(await read_one(reader, other)) == 1
            assert len(slow._waiting) <= BACKLOG + SHARE
            while len(came) < 1_000:
                came += texts(await slow.take(NOW))
        assert came == [str(number) for number in range(1_000)]

    async def read_one(reader, log):
        say(log, "one")
        with reader.subscribe(log.key) as subscription:
            return await subscription.take(NOW)

    asyncio.run(scenario())


def test_a_new_streams_first_event_is_not_behind_the_backlog_of_others():
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        logs = [new_log(writer) for _ in range(20)]
        for log in logs:
            for number in range(500):
                say(log, str(number))
        late = new_log(writer)
        say(late, "first")
        with reader.subscribe(late.key) as subscription:
            assert texts(await subscription.take(NOW)) == ["first"]
        behind = sum(len(log.entries) - log.written for log in logs)
        assert behind > 5_000, "the others' backlog was written first"
        for log in logs:
            await written(log, 500)

    asyncio.run(scenario())


def test_two_readers_of_one_turn_from_different_places():
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        log = new_log(writer)
        for number in range(10):
            say(log, str(number))
        with reader.subscribe(log.key, after=7) as second, reader.subscribe(log.key) as first:
            assert texts(await second.take(NOW)) == ["7", "8", "9"]
            assert texts(await first.take(NOW)) == [str(number) for number in range(10)]

    asyncio.run(scenario())


def test_events_are_kept_while_the_server_is_away_and_the_lost_ones_put_back(client):
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        log = new_log(writer)
        reading = asyncio.create_task(read_all(reader, log.key))
        for number in range(3):
            say(log, str(number))
        await written(log, 3)
        kept = client.dump(log.key)
        say(log, "3")
        say(log, "4")
        await written(log, 5)
        # As after a crash of the server: what it had not yet saved is gone, and so is the connection.
        client.restore(log.key, 0, kept, replace=True)
        client.client_kill_filter(_id=await writer._client.client_id())
        say(log, "5")
        assert await log.close(1, {"state": "completed"}, NOW)
        assert texts(await reading) == [str(number) for number in range(6)]
        assert texts(await read_all(reader, log.key)) == [str(number) for number in range(6)]

    asyncio.run(scenario())


def test_a_log_that_vanishes_without_a_disconnect_is_written_again_whole(client):
    """As by eviction, FLUSHALL, or a failover behind a proxy."""

    async def scenario():
        writer, reader = EventWriter(), EventReader()
        log = new_log(writer)
        for number in range(3):
            say(log, str(number))
        await written(log, 3)
        client.delete(log.key)
        say(log, "3")
        await written(log, 4)
        client.delete(log.key)
        assert await log.close(1, {"state": "completed"}, NOW)
        came = await read_all(reader, log.key)
        assert [event.seq for event in came] == [1, 2, 3, 4, events.END_SEQ]

    asyncio.run(scenario())


async def written(log, count):
    await asyncio.to_thread(eventually, lambda: log.written >= count)


def test_a_writer_that_comes_late_appends_nothing_after_the_end(client):
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        turn = ChatTurn(tenant_id=7, public_id=uuid.uuid4())
        log = writer.open(7, turn.public_id)
        say(log, "kept")
        await written(log, 1)
        assert texts(orphaned_turns._fence_and_read(client, turn)) == ["kept"]
        say(log, "too late")
        async with asyncio.timeout(NOW):
            await log.is_settled.wait()
        orphaned_turns.append_end(turn, Ending(TurnState.INTERRUPTED, "WORKER_LOST"))
        came = await read_all(reader, log.key)
        assert texts(came) == ["kept"]
        assert came[-1].data["error_code"] == "WORKER_LOST"

    asyncio.run(scenario())


def test_without_the_fence_it_would_append(client):
    async def scenario():
        writer, reader = EventWriter(), EventReader()
        log = new_log(writer)
        say(log, "kept")
        await written(log, 1)
        say(log, "too late")
        await written(log, 2)
        with reader.subscribe(log.key) as subscription:
            assert texts(await subscription.take(NOW)) == ["kept", "too late"]

    asyncio.run(scenario())


def test_a_log_ends_and_is_given_its_time_to_live(client):
    async def scenario():
        writer = EventWriter()
        log = new_log(writer)
        say(log, "one")
        await written(log, 1)
        assert client.ttl(log.key) > settings.EVENT_LOG_TTL_SECONDS
        assert await log.close(1, {"state": "completed"}, NOW)
        assert 0 < client.ttl(log.key) <= settings.EVENT_LOG_TTL_SECONDS

    asyncio.run(scenario())


# --- joining ----------------------------------------------------------------------------------------------------------
class Heard:
    """A log that only listens."""

    def __init__(self):
        self.entries = []

    def append(self, kind, attempt, data):
        self.entries.append((kind, data))
        return len(str(data))


def plain(text, index=0):
    return ChatDelta(index, {"content": text}, {}, {})


def raw(delta, index=0, **choice):
    return ChatDelta(index, delta, choice, {})


def recorded(*steps, room=1_000_000):
    async def scenario():
        heard = Heard()
        recorder = Recorder(heard, room)
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                recorder.delta(step)
        recorder.flush()
        return [(data["offset"], data["delta"]) for _, data in heard.entries], recorder

    return asyncio.run(scenario())


def test_deltas_of_one_read_go_at_once_and_together():
    said, _ = recorded(plain("a"), 0.05, plain("b"), plain("c"), 0.0, plain("d"))
    assert said == [(0, {"content": "a"}), (1, {"content": "bc"}), (3, {"content": "d"})]


def test_the_first_delta_goes_at_once_and_its_neighbours_are_joined():
    said, recorder = recorded(*map(plain, "abcdef"))
    assert said == [(0, {"content": "a"}), (1, {"content": "bcdef"})]
    assert recorder.answer.choices()[0]["message"]["content"] == "abcdef"


def test_deltas_are_not_held_longer_than_20_ms():
    said, _ = recorded(plain("a"), plain("b"), 0.05, plain("c"), 0.05, plain("d"))
    assert [delta["content"] for _, delta in said] == ["a", "b", "c", "d"]


def test_what_cannot_be_joined_keeps_its_order():
    said, recorder = recorded(
        plain("a"),
        plain("b"),
        raw({"reasoning_content": "r"}),
        raw({"reasoning_content": "s"}),
        raw({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}),
        raw({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}),
        raw({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}),
        raw({"tool_calls": [{"index": 1, "id": "d", "function": {"name": "g", "arguments": "1"}}]}),
    )
    assert [next(iter(delta)) for _, delta in said] == [
        "content",
        "content",
        "reasoning_content",
        "tool_calls",
        "tool_calls",
    ]
    message = recorder.answer.choices()[0]["message"]
    assert message["reasoning_content"] == "rs"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}", "1"]


def test_choices_are_joined_each_for_itself():
    said, recorder = recorded(plain("a"), plain("x", 1), plain("b"), plain("y", 1), plain("c"))
    assert said == [(0, {"content": "a"}), (0, {"content": "xy"}), (1, {"content": "bc"})]
    assert [choice["message"]["content"] for choice in recorder.answer.choices()] == ["abc", "xy"]


def test_log_probabilities_are_joined_too():
    said, recorder = recorded(
        raw({"content": "a"}, logprobs={"content": [1]}),
        raw({"content": "b"}, logprobs={"content": [2]}),
        raw({"content": "c"}, logprobs={"content": [3]}),
    )
    assert len(said) == 2
    assert recorder.answer.choices()[0]["logprobs"] == {"content": [1, 2, 3]}


def test_an_answer_stops_at_its_bound():
    said, recorder = recorded(plain("abc"), plain("defgh"), 0.03, plain("never"), room=5)
    assert [delta["content"] for _, delta in said] == ["abc", "de"]
    assert recorder.is_full


def test_what_stands_around_the_text_is_bounded_too():
    said, recorder = recorded(*[raw({"content": "x", "junk": "y" * 100_000})] * 20, room=1_000)
    assert recorder.is_full
    assert len(said) == 10
