"""The deadlines of one attempt, driven by hand: which budget runs out, when, and what that is called."""

import pytest

from streaming.upstream.budgets import ChatBudgets
from streaming.upstream.errors import (
    FinishGraceElapsedError,
    StreamInactivityTimeoutError,
    StreamLifetimeExceededError,
    StreamRequestTimeoutError,
)
from streaming.upstream.retry import classify_retry_error
from streaming.upstream.stream_clock import StreamClock

OFF = ChatBudgets(**dict.fromkeys(ChatBudgets.__dataclass_fields__, 0))


class At:
    """A clock driven by hand: `wait(seconds)` waits for upstream, `consume(seconds)` is the consumer's time."""

    def __init__(self, **budgets):
        self.clock, self.now = StreamClock(ChatBudgets(**(OFF.__dict__ | budgets))), 1_000.0

    def wait(self, seconds):
        self.due = self.clock.begin_wait(self.now)
        self.now += seconds
        expired = self.now >= self.due
        error = self.clock.expiry_error(self.now) if expired else None
        self.clock.end_wait(self.now)
        return error

    def consume(self, seconds):
        self.now += seconds

    def packet(self, seconds, *, chunk=False, content=False):
        error = self.wait(seconds)
        self.clock.bytes_arrived(10)
        if chunk or content:
            self.clock.chunk_arrived()
        if content:
            self.clock.content_arrived()
        return error


BUDGETS = {
    "request_timeout_ms": 1_000,
    "stream_first_content_timeout_ms": 8_000,
    "stream_idle_timeout_ms": 2_000,
    "stream_keepalive_timeout_ms": 5_000,
    "stream_lifetime_ms": 20_000,
    "finish_grace_ms": 500,
}


def streaming(**changed):
    at = At(**(BUDGETS | changed))
    assert at.wait(0.5) is None
    at.clock.headers_arrived()
    assert at.packet(0.5, content=True) is None
    return at


def test_the_request_has_a_budget_of_its_own():
    error = At(**BUDGETS).wait(1.0)
    assert isinstance(error, StreamRequestTimeoutError)
    assert (error.budget_ms, error.code) == (1_000, "ETIMEDOUT")


def test_a_role_only_chunk_does_not_end_the_wait_for_the_first_content():
    at = At(**BUDGETS)
    at.clock.headers_arrived()
    assert at.packet(1, chunk=True) is None
    assert at.wait(6.9) is None
    error = at.wait(0.2)
    assert (error.idle_ms, error.kind, error.chunks_received) == (8_000, "silent", 1)


@pytest.mark.parametrize(("kind", "chunk"), [("keepalive", False), ("empty_chunks", True)])
def test_what_came_in_place_of_the_first_content_names_the_stall(kind, chunk):
    at = At(**BUDGETS)
    at.clock.headers_arrived()
    assert [at.packet(1, chunk=chunk) for _ in range(7)] == [None] * 7
    assert at.wait(1.0).kind == kind


def test_silence_after_content_is_the_idle_budgets():
    at = streaming()
    error = at.wait(2.0)
    assert (type(error), error.kind, error.idle_ms) == (StreamInactivityTimeoutError, "silent", 2_000)


def test_bytes_without_a_chunk_run_into_the_keepalive_budget_since_the_last_chunk():
    at = streaming()
    assert [at.packet(1.5) for _ in range(3)] == [None] * 3
    error = at.wait(0.5)
    assert (error.kind, error.idle_ms) == ("keepalive", 5_000)


def test_bytes_then_silence_is_silence():
    at = streaming()
    assert at.packet(1.0) is None
    error = at.wait(2.0)
    assert (error.kind, error.idle_ms) == ("silent", 2_000)


def test_with_equal_budgets_keepalives_do_not_prolong_the_wait():
    at = streaming(stream_keepalive_timeout_ms=2_000)
    assert at.packet(1.5) is None
    error = at.wait(0.5)
    assert (error.kind, error.idle_ms) == ("keepalive", 2_000)


def test_chunks_just_inside_every_idle_budget_end_with_the_lifetime():
    at = streaming()
    errors = [at.packet(1.9, content=True) for _ in range(11)]
    assert errors[:9] == [None] * 9
    error = next(error for error in errors if error)
    assert (type(error), error.budget_ms) == (StreamLifetimeExceededError, 20_000)
    assert not classify_retry_error(error).retryable


def test_no_budget_counts_the_consumers_time():
    at = streaming()
    for _ in range(3):
        at.consume(100.0)
        assert at.packet(1.0, content=True) is None
    assert at.clock.waited_ms(at.now) == 4_000


def test_after_the_finish_only_the_grace_counts_and_it_is_no_failure():
    at = streaming(stream_lifetime_ms=1_200)
    at.clock.finished()
    assert at.packet(0.4) is None
    at.clock.finished()
    error = at.wait(0.1)
    assert (type(error), error.end_state) == (FinishGraceElapsedError, "completed")


def test_after_done_only_the_connections_own_end_is_awaited():
    at = streaming()
    at.clock.done()
    assert at.wait(0.04) is None
    assert isinstance(at.wait(0.02), FinishGraceElapsedError)


@pytest.mark.parametrize("disabled", ["stream_idle_timeout_ms", "stream_keepalive_timeout_ms"])
def test_a_disabled_budget_never_fires(disabled):
    at = streaming(**{disabled: 0, "stream_lifetime_ms": 0})
    step = 4.0 if disabled == "stream_idle_timeout_ms" else 1.5
    chunk = disabled == "stream_idle_timeout_ms"
    assert [at.packet(step, chunk=chunk) for _ in range(50)] == [None] * 50


def test_first_content_and_gaps_are_measured():
    at = streaming()
    assert at.clock.first_content_ms == 1_000
    at.packet(1.5, content=True)
    at.packet(0.2, content=True)
    assert at.clock.longest_gap_ms == 1_500
    at.clock.begin_wait(at.now)
    assert at.clock.quiet_ms(at.now + 0.7) == 700
