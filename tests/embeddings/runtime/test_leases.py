"""Leases kept alive by one thread in each process, whatever a call raises."""

import itertools
import threading
import time

import pytest
from django.db import OperationalError

from embeddings.runtime import leases
from tests.support.waiting import eventually


@pytest.fixture
def round_of_the_keeper():
    """Carries out one round at which everything is due."""
    hours = itertools.count(1)
    return lambda: leases.call_due(time.monotonic() + 3600 * next(hours))


def test_renewed_while_inside_and_never_after(round_of_the_keeper):
    renewed = []
    with leases.kept(lambda: renewed.append(1) or True):
        round_of_the_keeper()
        round_of_the_keeper()
    count = len(renewed)
    assert count >= 2
    for _ in range(3):
        round_of_the_keeper()
    assert len(renewed) == count


def test_one_that_is_gone_is_let_go(round_of_the_keeper):
    rounds = []
    with leases.kept(lambda: bool(rounds.append(1))):
        round_of_the_keeper()
        round_of_the_keeper()
    assert len(rounds) == 1


@pytest.mark.parametrize("error", [OperationalError("the database is away"), KeyError("a fault of our own")], ids=repr)
def test_one_that_fails_does_not_keep_the_others_from_being_renewed(round_of_the_keeper, error):
    renewed = []

    def fail():
        raise error

    with leases.kept(fail), leases.kept(lambda: bool(renewed.append(1)) or True):
        round_of_the_keeper()
        round_of_the_keeper()
    assert len(renewed) >= 2


@pytest.mark.parametrize("error", [OperationalError, KeyError])
def test_the_keeper_outlives_what_a_call_raises_and_tries_again(error):
    calls = []

    def fail_at_first():
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            raise error
        return True

    with leases.repeated(fail_at_first, 0.02):
        eventually(lambda: len(calls) > 2, message="the keeper calls again")
    assert set(calls) == {"sluicegate-keeper"}


def test_what_is_due_sooner_wakes_the_keeper():
    calls = []
    with leases.kept(lambda: True), leases.repeated(lambda: calls.append(1) or True, 0.02):
        eventually(lambda: calls, timeout=3, message="the sooner one is called")


def test_the_keeper_is_one_thread_whatever_is_kept():
    with leases.kept(lambda: True), leases.repeated(lambda: True, 0.5):
        keepers = [thread for thread in threading.enumerate() if thread.name == "sluicegate-keeper"]
        assert len(keepers) == 1
