"""A reader of a turn when not all is well: the log away, broken or gone; the turn queued for long; the worker lost."""

import asyncio
import uuid
from contextlib import aclosing
from datetime import timedelta

import pytest
from django.db.models import F
from django.utils import timezone

from project.runtime.database_threads import in_database
from streaming.log import events, reader
from streaming.log.writer import EventWriter
from streaming.models import ChatTurn
from streaming.states import TurnOrigin, TurnState
from streaming.turns import follow, orphaned_turns, transitions
from streaming.turns.model_list import default_model
from streaming.turns.transitions import Ending, NewTurn, Result
from tests.support.factories import make_provider, make_tenant
from tests.support.waiting import eventually

STORED = [
    {"index": 0, "message": {"role": "assistant", "content": "one two three"}, "finish_reason": "stop"},
    {"index": 1, "message": {"role": "assistant", "content": None, "refusal": "no"}, "finish_reason": "stop"},
]


@pytest.fixture
def tenant(transactional_db):
    return make_tenant(chat_provider=make_provider(stream_idle_timeout_ms=400))


def make_turn(tenant):
    model = default_model(tenant, uses_knowledge=False)
    row, claim = transitions.take_claimed(NewTurn(tenant, model, {"messages": []}, TurnOrigin.NATIVE))
    return fresh(row), claim


def fresh(row):
    """The row as a door finds it."""
    return ChatTurn.objects.select_related("provider").get(pk=row.pk)


def end(claim, state=TurnState.COMPLETED):
    assert transitions.end(claim, Ending(state), Result(STORED, {"total_tokens": 3}))


async def followed(row, after=0, until=lambda event: event.is_end):
    came = []
    async with asyncio.timeout(15), aclosing(follow.follow(row, after)) as following:
        async for event in following:
            if event.type != events.TICK:
                came.append(event)
            if until(event):
                return came
    raise AssertionError(f"the turn did not end: {came}")


def said(came):
    return [(event.type, event.data.get("delta") or event.data.get("notice")) for event in came]


REST = [
    (events.DELTA, {"content": "one two three"}),
    (events.DELTA, {"refusal": "no"}),
    (events.FINISH, None),
    (events.FINISH, None),
    (events.USAGE, None),
    (events.END, None),
]


def test_a_log_that_is_gone(tenant):
    row, claim = make_turn(tenant)
    end(claim)
    assert said(asyncio.run(followed(fresh(row)))) == REST


def test_a_log_server_that_is_away_until_after_the_end(tenant, settings):
    settings.REDIS_URL, settings.EMBEDDED_VALKEY = "redis://127.0.0.1:1", False
    row, claim = make_turn(tenant)

    async def scenario():
        reading = asyncio.create_task(followed(row))
        await in_database(end, claim)
        return await reading

    assert said(asyncio.run(scenario())) == REST


def test_a_log_whose_end_never_came(tenant):
    row, claim = make_turn(tenant)

    async def scenario():
        log = EventWriter().open(row.tenant_id, row.public_id)
        log.append(events.DELTA, 1, {"choice": 0, "offset": 0, "delta": {"content": "one "}})
        reading = asyncio.create_task(followed(row))
        await in_database(end, claim)
        return await reading

    came = asyncio.run(scenario())
    assert said(came)[:2] == [(events.DELTA, {"content": "one "}), (events.DELTA, {"content": "two three"})]
    assert came[1].data["offset"] == 4
    assert said(came)[2:] == REST[1:]


class TestASlowRead:
    """The turn has ended, its log is whole, and this process is too busy to have read it yet."""

    @pytest.fixture
    def places(self, tenant, monkeypatch):
        """Where in the log stands what a reader is told, who waits for no read at all."""
        monkeypatch.setattr(follow, "LOG_POLL_S", 0.0)
        row, claim = make_turn(tenant)

        async def scenario():
            log = EventWriter().open(row.tenant_id, row.public_id)
            for text in ("one ", "two ", "three"):
                log.append(events.DELTA, 1, {"choice": 0, "offset": 0, "delta": {"content": text}})
            await in_database(end, claim)
            assert await log.close(1, {"state": "completed"}, 5.0)
            return [event.seq for event in await followed(await in_database(fresh, row))]

        return lambda: asyncio.run(scenario())

    def test_its_events_are_the_logs_own(self, places):
        assert places() == [1, 2, 3, events.END_SEQ]

    def test_a_long_silence_before_the_end_takes_nothing_of_its_time(self, tenant):
        row, claim = make_turn(tenant)

        class NothingRead:
            async def take(self, _):
                return []

        async def scenario():
            reading = follow._Reading(row, 0)
            reading._heard_at -= follow.LOG_TIMEOUT_S
            await in_database(end, claim)
            return [await reading.take(NothingRead()) for _ in range(2)]

        assert asyncio.run(scenario()) == [[follow._TICK]] * 2

    def test_twin_without_asking_the_log_they_come_from_the_row(self, places, monkeypatch):
        async def holds_nothing(*_):
            return False

        monkeypatch.setattr(reader.EventReader, "has_unread", holds_nothing)
        assert places() == [0] * (len(REST) - 1) + [events.END_SEQ]


def test_a_turn_that_stands_queued_while_workers_are_there(tenant, monkeypatch):
    monkeypatch.setattr(orphaned_turns, "_answers", [(float("inf"), True)])
    monkeypatch.setattr(follow, "QUEUED_NOTICE_S", 0.3)
    row, _ = make_turn(tenant)
    now = timezone.now()
    ChatTurn.objects.update(state=TurnState.QUEUED, created_at=now - timedelta(minutes=1), rung_at=now)
    came = asyncio.run(followed(fresh(row), until=lambda event: event.type == events.NOTICE))
    assert said(came) == [(events.NOTICE, "queued")]


def test_silence_is_told_again_and_again(tenant):
    row, claim = make_turn(tenant)
    notices = []

    def third(event):
        notices.extend([event.data["seconds"]] if event.type == events.NOTICE else [])
        return len(notices) == 3

    asyncio.run(followed(row, until=third))
    assert notices == sorted(notices)
    end(claim)


def test_any_reader_ends_a_turn_whose_worker_is_gone_with_the_text_of_its_log(tenant):
    row, _ = make_turn(tenant)

    async def scenario():
        log = EventWriter().open(row.tenant_id, row.public_id)
        log.append(events.ATTEMPT, 1, {"started_at": timezone.now().isoformat()})
        log.append(events.DELTA, 1, {"choice": 0, "offset": 0, "delta": {"content": "one "}})
        reading = [asyncio.create_task(followed(row)) for _ in range(2)]
        await asyncio.to_thread(eventually, lambda: log.written == 2)
        await in_database(ChatTurn.objects.update, lease_expires_at=F("lease_expires_at") - timedelta(minutes=1))
        return await asyncio.gather(*reading)

    first, second = ([event for event in came if event.seq] for came in asyncio.run(scenario()))
    assert said(first) == said(second)
    assert first[-1].data["error_code"] == "WORKER_LOST"
    row.refresh_from_db()
    assert (row.state, row.answer) == (TurnState.INTERRUPTED, "one ")
    assert row.attempts.get().end_state == TurnState.INTERRUPTED


def test_a_lost_turn_is_left_alone_while_its_log_cannot_be_read_and_ended_when_that_lasts(tenant, settings):
    settings.REDIS_URL, settings.EMBEDDED_VALKEY = "redis://127.0.0.1:1", False
    row, _ = make_turn(tenant)
    for seconds, ends in ((5, False), (61, True)):
        ChatTurn.objects.update(lease_expires_at=timezone.now() - timedelta(seconds=seconds))
        row.refresh_from_db()
        assert orphaned_turns.end_orphaned(row) is ends
    row.refresh_from_db()
    assert (row.state, row.answer) == (TurnState.INTERRUPTED, "")


def test_the_rows_of_many_readers_are_looked_at_with_one_statement(tenant, monkeypatch):
    rows = [make_turn(tenant)[0] for _ in range(5)]
    asked = []
    real = follow._rows
    monkeypatch.setattr(follow, "_rows", lambda keys: asked.append(keys) or real(keys))

    async def scenario():
        return await asyncio.gather(*(follow.latest(row) for row in rows * 3))

    assert [row.pk for row in asyncio.run(scenario())] == [row.pk for row in rows * 3]
    assert [sorted(keys) for keys in asked] == [sorted(row.pk for row in rows)]


def test_readers_share_one_connection_per_loop():
    async def scenario():
        return reader.event_reader() is reader.event_reader(), reader.event_reader()

    same, first = asyncio.run(scenario())
    _, second = asyncio.run(scenario())
    assert same
    assert first is not second
    assert events.log_key(1, uuid.UUID(int=2)) != events.log_key(12, uuid.UUID(int=2))
