"""Checks of the installation itself: settings, the database, VAR_DIR, git."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.core.checks import messages as levels
from django.core.checks import run_checks
from django.db import DatabaseError, connection

from embeddings.checks import sqlite_is_new_enough
from embeddings.doctor.findings import Finding, Status, check, error, ok, warning
from embeddings.doctor.valkey import valkey_address
from embeddings.management.base import migrations_missing
from embeddings.management.rendering import printable

_GIB = 1024**3
FREE_LEAST, FREE_WANTED = _GIB // 10, _GIB
_GIT_TIMEOUT_S = 2.0


@check("settings")
def check_settings() -> Iterable[Finding]:
    """VAR_DIR, the servers' addresses, and Django's system checks. Prints no value that may be a secret."""
    database: dict[str, Any] = connection.settings_dict
    if connection.vendor == "sqlite":
        address = f"SQLite at {database['NAME']}"
    else:
        port = f":{database['PORT']}" if database["PORT"] else ""
        address = f"PostgreSQL {database['NAME']} at {database['HOST'] or 'a local socket'}{port}"
    places = f"VAR_DIR {settings.VAR_DIR}, database {address}, Valkey {valkey_address()}"
    yield ok("settings", f"{places}, DEBUG {'on' if settings.DEBUG else 'off'}")
    for message in [*run_checks(), *sqlite_is_new_enough(None)]:
        if not message.is_silenced():
            status = Status.ERROR if message.level >= levels.ERROR else Status.WARNING
            yield Finding(message.id or "settings", status, str(message.msg), message.hint or "")


@check("database")
def check_database() -> Iterable[Finding]:
    """Whether the database can be reached, can search vectors, and is migrated."""
    try:
        connection.ensure_connection()
    except DatabaseError as raised:
        reason = printable(str(raised).strip().splitlines()[0])
        yield error("database", f"cannot be used: {reason}", "start it, or correct DATABASE_URL")
        return
    yield _vector_search()
    missing = migrations_missing()
    if missing:
        yield error("database", f"answers; {missing} migrations are not applied yet", "manage.py migrate")
    else:
        yield ok("database", "answers; every migration is applied")


def _vector_search() -> Finding:
    if connection.vendor == "sqlite":
        return ok("vector search", f"in this process's memory, up to {settings.SEARCH_CACHE_BYTES} bytes")
    with connection.cursor() as cursor:
        cursor.execute("SELECT installed_version FROM pg_available_extensions WHERE name = 'vector'")
        found = cursor.fetchone()
    if found is None:
        return error("vector search", "this PostgreSQL server has no pgvector", "install pgvector on it")
    if found[0] is None:
        return warning(
            "vector search", "pgvector is installed, but not yet enabled in this database", "manage.py migrate"
        )
    return ok("vector search", f"pgvector {found[0]}")


@check("VAR_DIR")
def check_var_dir() -> Iterable[Finding]:
    """Whether VAR_DIR is writable and its disk has free space."""
    try:
        with tempfile.TemporaryFile(dir=settings.VAR_DIR) as probe:
            probe.write(b"doctor")
    except OSError as raised:
        yield error("VAR_DIR", f"{settings.VAR_DIR} cannot be written: {raised.strerror}", "free it, or set another")
        return
    free = shutil.disk_usage(settings.VAR_DIR).free
    detail = f"{settings.VAR_DIR} can be written, {free / _GIB:.1f} GiB are free"
    if free < FREE_WANTED:
        status = Status.ERROR if free < FREE_LEAST else Status.WARNING
        yield Finding("VAR_DIR", status, detail, "make room on its disk")
    else:
        yield ok("VAR_DIR", detail)


@check("git")
def check_git() -> Iterable[Finding]:
    try:
        run = subprocess.run(["git", "--version"], capture_output=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as raised:
        yield error("git", f"cannot be run: {type(raised).__name__}", "install git where sweeps run, on their PATH")
        return
    yield ok("git", printable(run.stdout.decode("utf-8", "replace").strip()))
