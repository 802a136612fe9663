"""Leases kept alive by one thread a process, and what it does when the database is away."""

import threading

from django.db import OperationalError

from embeddings.runtime import leases
from tests.support.waiting import eventually


def test_renewed_while_inside_and_never_after():
    renewed = []
    with leases.kept(lambda: renewed.append(threading.current_thread().name) or True):
        leases.renew_all()
        leases.renew_all()
    count = len(renewed)
    assert count >= 2
    for _ in range(3):
        leases.renew_all()
    assert len(renewed) == count


def test_one_that_is_gone_is_let_go():
    rounds = []
    with leases.kept(lambda: bool(rounds.append(1))):
        leases.renew_all()
        leases.renew_all()
    assert len(rounds) == 1


def test_one_that_fails_does_not_keep_the_others_from_being_renewed():
    renewed = []

    def away():
        raise OperationalError("the database is away")

    with leases.kept(away), leases.kept(lambda: bool(renewed.append(1)) or True):
        leases.renew_all()
        leases.renew_all()
    assert len(renewed) >= 2


def test_the_keeper_is_one_thread_whatever_is_kept():
    with leases.kept(lambda: True), leases.kept(lambda: True):
        keepers = [thread for thread in threading.enumerate() if thread.name == "sluicegate-keeper"]
        eventually(lambda: len(keepers) == 1)
