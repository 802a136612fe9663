"""Processes of this checkout for tests: web, chat workers, sweep workers. They share the test's database and Valkey."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from django.conf import settings
from django.db import connection
from honcho.environ import parse_procfile

from embeddings.runtime import valkey
from project.runtime.embedded import hold_valkey
from tests.support.provider_server import unused_port
from tests.support.waiting import eventually

CHECKOUT = Path(__file__).resolve().parents[2]

# Tens and hundreds of milliseconds where production has seconds.
LIMITS = {
    "LEASE_MS": "1500",
    "LEASE_RENEW_MS": "300",
    "CHAT_CLAIM_WAIT_MS": "1000",
    "CHAT_STATUS_WAIT_MS": "600",
    "CHAT_HEARTBEAT_MS": "300",
    "CHAT_RETRY_BASE_MS": "10",
    "CHAT_TURNS_PER_TENANT": "6",
    "CHAT_REQUEST_BYTES_MAX": "100000",
    "CHAT_ANSWER_CHARACTERS_MAX": "20000",
    "LOG_LEVEL": "INFO",
}


def database_url() -> str:
    """The address of this session's test database."""
    name = connection.settings_dict["NAME"]
    if connection.vendor == "sqlite":
        return f"sqlite://{name}"
    return os.environ["DATABASE_URL"].replace("/postgres?", f"/{name}?", 1)


def process_environ() -> dict[str, str]:
    """The environment of a process that shares this session's database and Valkey."""
    return os.environ | LIMITS | {"DATABASE_URL": database_url(), "DJANGO_SETTINGS_MODULE": "project.settings"}


class Process:
    """A child process with its output in a file."""

    def __init__(self, name: str, *arguments: str, **environ: str) -> None:
        self.log = Path(settings.VAR_DIR) / f"{name}.log"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=CHECKOUT,
                env=process_environ() | environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def terminate(self, timeout: float = 10.0) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


def start_worker(name: str = "worker", **environ: str) -> Process:
    """A chat worker, up to the moment that it takes messages."""
    words = ("celery", "--app", "project", "worker", "--pool", "threads", "--concurrency", "16", "--queues", "chat")
    flags = ("--loglevel", "INFO", "--hostname", f"{name}@test", "--without-gossip", "--without-mingle")
    process = Process(name, *words, *flags, **environ)
    eventually(lambda: " ready." in process.output, timeout=60, message=f"{name} is ready")
    return process


def web_command() -> list[str]:
    """The words of the Procfile's `web`, without its address."""
    words = parse_procfile((CHECKOUT / "Procfile").read_text()).processes["web"].split()
    for option in ("--host", "--port"):
        at = words.index(option)
        del words[at : at + 2]
    return words


def start_web(name: str = "web", *options: str, **environ: str) -> tuple[Process, str]:
    """A web process with further options, and its address."""
    port = unused_port()
    process = Process(name, *web_command(), "--port", str(port), *options, **environ)
    address = f"http://127.0.0.1:{port}"
    eventually(lambda: _answers(f"{address}/healthz"), timeout=60, message=f"{name} answers")
    return process, address


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


# --- workers for sweeps and embeddings ------------------------------------------------------------------------------
# Leases short enough to be lost within a test; LEASE_RENEW_MS leaves room for busy cores.
LEASES = {"LEASE_MS": "3000", "LEASE_RENEW_MS": "300"}
QUEUES = ("sweeps", "embeddings", "housekeeping")
_numbers = itertools.count(1)


class Worker(Process):
    """One worker process of these queues: `kill` is kill -9, `terminate` a supervisor's stop."""

    def __init__(self, application: str, queues: Sequence[str] = QUEUES) -> None:
        self.name = f"sweeper-{next(_numbers)}"
        words = ("celery", "--app", application, "worker", "--pool", "threads", "--concurrency", "4")
        flags = ("--queues", ",".join(queues), "--loglevel", "INFO", "--hostname", f"{self.name}@test")
        super().__init__(self.name, *words, *flags, "--without-gossip", "--without-mingle", **LEASES)

    def wait_ready(self) -> None:
        eventually(lambda: " ready." in self.output, timeout=60, message=f"{self.name} is ready")

    def wait_dead(self) -> None:
        eventually(lambda: self.returncode is not None, timeout=60, message=f"{self.name} dies")

    def pause(self) -> None:
        """SIGSTOP: the process stops running and keeps its sockets."""
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
    """Starts workers for one test, without the wake-ups of other tests."""
    hold_valkey(settings.VAR_DIR)
    valkey.client().delete(*QUEUES)
    made = Fleet()
    yield made
    made.end()
    for worker in made.workers:
        assert "Traceback" not in worker.output
