"""Real worker processes for tests: they share the test's database and the embedded Valkey of its VAR_DIR."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from django.conf import settings

from embeddings.runtime import valkey
from project.runtime.embedded import hold_valkey
from tests.support.chat_stack import Process
from tests.support.waiting import eventually

# Leases short enough to be lost within a test; LEASE_RENEW_MS leaves room for busy cores.
LEASES = {"LEASE_MS": "3000", "LEASE_RENEW_MS": "300"}
QUEUES = ("sweeps", "embeddings")
_numbers = itertools.count(1)


class Worker(Process):
    """One worker process: `kill` is kill -9, `terminate` a supervisor's stop."""

    def __init__(self, application: str) -> None:
        self.name = f"sweeper-{next(_numbers)}"
        words = ("celery", "--app", application, "worker", "--pool", "threads", "--concurrency", "4")
        flags = ("--queues", ",".join(QUEUES), "--loglevel", "INFO", "--hostname", f"{self.name}@test")
        super().__init__(self.name, *words, *flags, "--without-gossip", "--without-mingle", **LEASES)

    def wait_ready(self) -> None:
        eventually(lambda: " ready." in self.output, timeout=60, message=f"{self.name} is ready")

    def wait_dead(self) -> None:
        eventually(lambda: self.returncode is not None, timeout=60, message=f"{self.name} dies")

    def pause(self) -> None:
        """SIGSTOP: the process stands still and keeps its sockets."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)


@dataclass
class Fleet:
    """Starts workers for one test, and ends them all."""

    workers: list[Worker] = field(default_factory=list)

    def start(self, count: int = 1, application: str = "project") -> list[Worker]:
        """So many more, up to the moment that they take messages."""
        started = [Worker(application) for _ in range(count)]
        self.workers += started
        for worker in started:
            worker.wait_ready()
        return started

    def end(self) -> None:
        for worker in self.workers:
            if worker.returncode is None:
                worker.resume()
                worker.kill()


@pytest.fixture
def fleet(transactional_db: None) -> Iterator[Fleet]:
    """Workers that know no other test's doorbells."""
    hold_valkey(settings.VAR_DIR)
    valkey.client().delete(*QUEUES)
    made = Fleet()
    yield made
    made.end()
    for worker in made.workers:
        assert "Traceback" not in worker.output
