"""What every test stands on: one database that other processes can open too, and a loopback-only network."""

import os
import pathlib
import socket

import pytest
from django.conf import settings
from django.test import override_settings

from embeddings.providers import retries
from project.runtime import database_threads
from tests.support.chat_stack import chat, chat_stack  # noqa: F401  (fixtures that start processes: one definition, one start)
from tests.support.local_models import local_server  # noqa: F401
from tests.support.processes import database_url, fleet  # noqa: F401
from tests.support.sweeps import stage  # noqa: F401


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix):
    """SQLite in a file, as in production: worker processes of a test open the same database."""
    database = settings.DATABASES["default"]
    if "sqlite" in database["ENGINE"]:
        database.setdefault("TEST", {})["NAME"] = str(settings.VAR_DIR / "test.sqlite3")


@pytest.fixture
def process_environment(transactional_db):
    """The environment of a process that shares this test's database."""
    return os.environ | {"DATABASE_URL": database_url(), "DJANGO_SETTINGS_MODULE": "project.settings"}


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch):
    """Refuses connections that leave this machine."""
    real = socket.socket.connect

    def connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to leave the machine: {address}")
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(scope="session", autouse=True)
def _passwords_cost_nothing():
    """Half a second of hashing for each test's admin would prove nothing."""
    with override_settings(PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"]):
        yield


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Tens of milliseconds between the tries of one call. The tests of the pauses themselves override this."""
    monkeypatch.setattr(retries, "MODEL_LOAD_PAUSE_S", 0.02)
    monkeypatch.setattr(retries, "CONTENTION_PAUSE_S", 0.02)


@pytest.fixture(autouse=True)
def _no_thread_keeps_a_connection():
    """A database can be dropped only when nobody is connected to it."""
    yield
    database_threads.close_connections()


REPOSITORY_ROOT = pathlib.Path(__file__).resolve().parent.parent
