"""Rules between settings: each says what is wrong under its own id, and is silent otherwise."""

import sqlite3
from pathlib import Path

import pytest
from django.conf import settings as configured
from django.core.checks import run_checks

from embeddings import checks


def found():
    """The ids of what the checks find now."""
    return {message.id for message in run_checks() if message.id and message.id.startswith("sluicegate.")}


def sqlite(**changes):
    options = {"transaction_mode": "IMMEDIATE"} | changes.pop("OPTIONS", {})
    return {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "x", "OPTIONS": options} | changes}


def test_the_default_settings_are_sound():
    assert found() == set()


@pytest.mark.parametrize(
    ("changes", "check", "id_"),
    [
        ({"LEASE_MS": 10_000, "LEASE_RENEW_MS": 5_000}, checks.leases_outlive_their_renewal, "sluicegate.E001"),
        ({"CELERY_WORKER_POOL": "prefork"}, checks.workers_are_threads, "sluicegate.E002"),
        ({"SOURCE_ROOTS": (Path("/"),)}, checks.source_roots_are_narrow, "sluicegate.E003"),
        ({"SOURCE_ROOTS": (Path("/nowhere/at/all"),)}, checks.source_roots_are_narrow, "sluicegate.W001"),
        ({"DATABASES": sqlite(ATOMIC_REQUESTS=True)}, checks.transactions_are_short, "sluicegate.E005"),
        (
            {"DATABASES": sqlite(OPTIONS={"transaction_mode": "DEFERRED"})},
            checks.transactions_are_short,
            "sluicegate.E005",
        ),
        ({"SECRET_KEY": "short"}, checks.secret_key_is_secret, "sluicegate.E006"),
        ({"SECRET_KEY": "django-insecure-" + "a" * 40}, checks.secret_key_is_secret, "sluicegate.E006"),
        ({"DEBUG": True, "ALLOWED_HOSTS": ["example.com"]}, checks.debug_stays_at_home, "sluicegate.E007"),
        ({"DEBUG": True, "ALLOWED_HOSTS": ["*"]}, checks.debug_stays_at_home, "sluicegate.E007"),
        ({"BUSY_RETRY_AFTER_MAX_MS": 2, "BUSY_TOTAL_MAX_MS": 1}, checks.busy_timeouts_fit, "sluicegate.E008"),
        ({"EMBEDDED_VALKEY": False, "REDIS_URL": "amqp://x"}, checks.redis_url_can_be_used, "sluicegate.E009"),
    ],
)
def test_what_cannot_work_is_found(changes, check, id_, monkeypatch):
    # Not the settings fixture: a change of DATABASES is looked at, and never reaches the connections.
    for name, value in changes.items():
        monkeypatch.setattr(configured, name, value, raising=False)
    (message,) = check(None)
    assert message.id == id_
    assert message.hint


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"LEASE_MS": 10_001, "LEASE_RENEW_MS": 5_000}, checks.leases_outlive_their_renewal),
        ({"CELERY_WORKER_POOL": "threads"}, checks.workers_are_threads),
        ({"SOURCE_ROOTS": None}, checks.source_roots_are_narrow),
        ({"DATABASES": sqlite()}, checks.transactions_are_short),
        ({"DATABASES": {"default": {"ENGINE": "django.db.backends.postgresql"}}}, checks.transactions_are_short),
        ({"SECRET_KEY": "a" * 32}, checks.secret_key_is_secret),
        ({"DEBUG": True, "ALLOWED_HOSTS": ["localhost", "127.0.0.1"]}, checks.debug_stays_at_home),
        ({"DEBUG": False, "ALLOWED_HOSTS": ["example.com"]}, checks.debug_stays_at_home),
        ({"BUSY_RETRY_AFTER_MAX_MS": 1, "BUSY_TOTAL_MAX_MS": 1}, checks.busy_timeouts_fit),
        ({"EMBEDDED_VALKEY": False, "REDIS_URL": "rediss://example.com"}, checks.redis_url_can_be_used),
    ],
)
def test_what_works_is_not(changes, check, monkeypatch):
    for name, value in changes.items():
        monkeypatch.setattr(configured, name, value, raising=False)
    assert check(None) == []


def test_source_roots_beside_the_own_folder(tmp_path, monkeypatch):
    for folder in ("var", "git"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(configured, "VAR_DIR", tmp_path / "var")
    monkeypatch.setattr(configured, "SOURCE_ROOTS", (tmp_path / "git",))
    assert checks.source_roots_are_narrow(None) == []
    monkeypatch.setattr(configured, "SOURCE_ROOTS", (tmp_path / "var" / "git",))
    assert [message.id for message in checks.source_roots_are_narrow(None)] == ["sluicegate.E003"]


def test_sqlite_too_old(monkeypatch):
    monkeypatch.setattr(configured, "DATABASES", sqlite())
    assert checks.sqlite_is_new_enough(None) == []
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    assert [message.id for message in checks.sqlite_is_new_enough(None)] == ["sluicegate.E004"]


def test_a_broken_rule_ends_a_command_with_status_2(monkeypatch):
    from django.core.management.base import SystemCheckError

    from embeddings.management.commands.provider import Command

    monkeypatch.setattr(configured, "LEASE_RENEW_MS", configured.LEASE_MS)
    with pytest.raises(SystemCheckError, match=r"sluicegate.E001") as ended:
        Command().execute(act=print, force_color=False, no_color=True, skip_checks=False)
    assert ended.value.returncode == 2
