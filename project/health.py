"""Liveness (`/healthz`) and readiness (`/readyz`) of this process."""

from __future__ import annotations

from django.db import DatabaseError, InterfaceError, connection
from django.http import HttpRequest, JsonResponse

from project.runtime.database_threads import in_database, in_waiting_thread
from streaming.log import valkey


async def healthz(request: HttpRequest) -> JsonResponse:
    """200 while the event loop runs. Checks nothing else: killing this process would not mend the database."""
    return JsonResponse({"status": "ok"})


async def readyz(request: HttpRequest) -> JsonResponse:
    """200 if the database and the event log answer, else 503 with the state of each."""
    parts = {"database": await in_database(_database_answers), "event_log": await in_waiting_thread(_log_answers)}
    ready = all(parts.values())
    return JsonResponse({"status": "ok" if ready else "unavailable", **parts}, status=200 if ready else 503)


def _database_answers() -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except (DatabaseError, InterfaceError):
        connection.close()
        return False
    return True


def _log_answers() -> bool:
    try:
        with valkey.connect() as client:
            return bool(client.ping())
    except valkey.UNREACHABLE:
        return False
