"""System checks: rules between settings, each with an id. A command or a worker that finds one broken does not start."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register

SQLITE_LEAST = (3, 35)
SECRET_KEY_LEAST = 32
_LOOPBACK_HOSTS = frozenset({"localhost", ".localhost", "127.0.0.1", "[::1]"})
_REDIS_SCHEMES = frozenset({"redis", "rediss", "unix", "redis+socket"})

_AppConfigs = Sequence[AppConfig] | None


@register()
def leases_outlive_their_renewal(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E001: one renewal may be late without the lease being lost."""
    if settings.LEASE_RENEW_MS * 2 < settings.LEASE_MS:
        return []
    hint = "Set LEASE_RENEW_MS to a third of LEASE_MS."
    facts = f"LEASE_RENEW_MS={settings.LEASE_RENEW_MS}, LEASE_MS={settings.LEASE_MS}"
    return [Error(f"A lease must last longer than two renewals ({facts}).", hint=hint, id="sluicegate.E001")]


@register()
def workers_are_threads(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E002: every provider call of a process runs on its one event loop; forked or green workers have none."""
    pool = getattr(settings, "CELERY_WORKER_POOL", "threads")
    if pool == "threads":
        return []
    return [Error(f"Workers run on threads, not on {pool!r}.", hint="Leave CELERY_WORKER_POOL.", id="sluicegate.E002")]


@register(Tags.security)
def source_roots_are_narrow(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E003, W001: a tenant's repository must not reach this application's own database and keys."""
    found: list[CheckMessage] = []
    for root in settings.SOURCE_ROOTS or ():
        if _overlap(root, Path(settings.VAR_DIR)):
            text = f"SOURCE_ROOTS holds {root}, which reaches VAR_DIR ({settings.VAR_DIR}): its database and keys."
            found.append(Error(text, hint="Name narrower folders.", id="sluicegate.E003"))
        elif not root.is_dir():
            text = f"SOURCE_ROOTS names {root}, and there is no such folder here."
            found.append(Warning(text, hint="Make it, or name another.", id="sluicegate.W001"))
    return found


@register(Tags.database)
def sqlite_is_new_enough(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E004: bulk inserts return their keys from 3.35 on."""
    if not _is_sqlite() or sqlite3.sqlite_version_info >= SQLITE_LEAST:
        return []
    least = ".".join(map(str, SQLITE_LEAST))
    hint = f"Use a Python with SQLite {least}, or set DATABASE_URL to PostgreSQL."
    return [Error(f"SQLite {sqlite3.sqlite_version} is older than {least}.", hint=hint, id="sluicegate.E004")]


@register()
def transactions_are_short(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E005: a request that is one transaction would hold the database's only writer."""
    database: Any = settings.DATABASES["default"]
    if database.get("ATOMIC_REQUESTS"):
        return [Error("ATOMIC_REQUESTS makes every request a writer.", hint="Leave it off.", id="sluicegate.E005")]
    if _is_sqlite() and database.get("OPTIONS", {}).get("transaction_mode") != "IMMEDIATE":
        text = "On SQLite a transaction must begin IMMEDIATE: otherwise one that reads first fails instead of waiting."
        return [Error(text, hint="Leave DATABASES as it is; DATABASE_URL names the file.", id="sluicegate.E005")]
    return []


@register(Tags.security)
def secret_key_is_secret(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E006: someone who guesses it can sign in as any user."""
    key = settings.SECRET_KEY
    if len(key) >= SECRET_KEY_LEAST and not key.startswith("django-insecure-"):
        return []
    text = f"SECRET_KEY must have at least {SECRET_KEY_LEAST} characters, and be nobody else's."
    return [Error(text, hint="Leave SECRET_KEY unset: one is made and kept under VAR_DIR.", id="sluicegate.E006")]


@register(Tags.security)
def debug_stays_at_home(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E007: DEBUG shows settings and source code to every visitor."""
    open_to = set(settings.ALLOWED_HOSTS) - _LOOPBACK_HOSTS
    # The test runner adds a name of its own.
    if not settings.DEBUG or open_to <= {"testserver"}:
        return []
    text = f"DEBUG is on, and ALLOWED_HOSTS is open to {', '.join(sorted(open_to))}."
    return [Error(text, hint="Unset DEBUG.", id="sluicegate.E007")]


@register()
def busy_timeouts_fit(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E008: the longest Retry-After of a busy provider must fit into a batch's total wait."""
    if settings.BUSY_RETRY_AFTER_MAX_MS <= settings.BUSY_TOTAL_MAX_MS:
        return []
    text = "BUSY_RETRY_AFTER_MAX_MS is longer than BUSY_TOTAL_MAX_MS: a batch would give up during its first wait."
    return [Error(text, hint="Lower the first, or raise the second.", id="sluicegate.E008")]


@register()
def redis_url_can_be_used(app_configs: _AppConfigs, **kwargs: Any) -> list[CheckMessage]:
    """E009: the broker and the event logs need a Valkey or a Redis."""
    if settings.EMBEDDED_VALKEY or urlsplit(settings.REDIS_URL).scheme in _REDIS_SCHEMES:
        return []
    # The URL may hold a password: it is not echoed.
    hint = "Use redis://, rediss:// or unix://, or unset it for the embedded Valkey."
    return [Error("REDIS_URL is not the URL of a Redis or Valkey.", hint=hint, id="sluicegate.E009")]


def _is_sqlite() -> bool:
    return "sqlite" in str(settings.DATABASES["default"]["ENGINE"])


def _overlap(one: Path, other: Path) -> bool:
    one, other = one.resolve(), other.resolve()
    return one.is_relative_to(other) or other.is_relative_to(one)
