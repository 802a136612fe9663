"""The database's clock: times that several processes compare are its own (docs/architecture.md, Data and states)."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now
from django.db.models.sql.compiler import SQLCompiler


class LeaseExpiry(Now):
    """Leases that end before this moment are lost.

    It is now; but for a lease's time after PostgreSQL has started no lease is lost: a restart may have lasted longer than a
    lease, and its holders get the time to renew before anyone takes their work.
    """

    def as_postgresql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra_context: Any
    ) -> tuple[str, tuple[str | int, ...]]:
        return self.as_sql(compiler, connection, template=postgresql_lease_expiry(), **extra_context)


def postgresql_lease_expiry() -> str:
    """The expression, for raw statements too."""
    started_before = f"clock_timestamp() - interval '{int(settings.LEASE_MS)} milliseconds'"
    return (
        f"(CASE WHEN pg_postmaster_start_time() < {started_before} "
        "THEN clock_timestamp() ELSE '-infinity'::timestamptz END)"
    )
