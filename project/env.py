"""Strict readers of environment variables: an invalid value stops the start with one line that names the variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Env:
    """Reads variables from `environ`: an unset or empty one gives the default, an invalid one raises ImproperlyConfigured."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, name: str, default: str = "") -> str:
        return self.environ.get(name, "").strip() or default

    def integer(self, name: str, default: int, *, least: int = 0, most: int = 2**31 - 1) -> int:
        raw = self.text(name)
        if not raw:
            return default
        try:
            value = int(raw)
        except ValueError:
            raise ImproperlyConfigured(f"{name} must be a whole number, not {raw!r}.") from None
        if not least <= value <= most:
            raise ImproperlyConfigured(f"{name} must be between {least} and {most}, not {value}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        raw = self.text(name).lower()
        if not raw:
            return default
        if raw in _TRUE or raw in _FALSE:
            return raw in _TRUE
        raise ImproperlyConfigured(f"{name} must be true or false, not {raw!r}.")

    def words(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A comma-separated list."""
        raw = self.text(name)
        return tuple(word.strip() for word in raw.split(",") if word.strip()) if raw else default

    def origins(self, name: str) -> tuple[str, ...]:
        """A comma-separated list of browsers' origins (`https://host[:port]`), or `*` for any."""
        given = self.words(name)
        for origin in given:
            parts = urlsplit(origin)
            if origin != "*" and origin != f"{parts.scheme}://{parts.netloc}":
                raise ImproperlyConfigured(
                    f"{name} must list origins such as https://chat.example.com, not {origin!r}."
                )
        return given

    def path(self, name: str, default: Path) -> Path:
        raw = self.text(name)
        return (Path(raw).expanduser() if raw else default).resolve()

    def database(self, name: str, sqlite_path: Path) -> dict[str, object]:
        """Django's database settings from a URL: `postgres://...`, or SQLite at `sqlite_path` when unset."""
        raw = self.text(name)
        if not raw:
            return _sqlite(sqlite_path)
        parts = urlsplit(raw)
        if parts.scheme == "sqlite":
            return _sqlite(Path(unquote(parts.path)))
        if parts.scheme not in {"postgres", "postgresql"}:
            raise ImproperlyConfigured(f"{name} must start with postgres:// or sqlite://, not {parts.scheme or raw!r}.")
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict

        try:
            parsed = conninfo_to_dict(raw)
        except ProgrammingError:
            # The message must not repeat the URL, which may hold a password.
            raise ImproperlyConfigured(f"{name} is not a valid PostgreSQL URL.") from None
        known = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
        options = {key: value for key, value in parsed.items() if key not in known}
        return {
            "ENGINE": "django.db.backends.postgresql",
            **{known[key]: str(value) for key, value in parsed.items() if key in known},
            # Django disables prepared statements by default, but the lane repeats a handful of statements.
            "OPTIONS": {**options, "server_side_binding": True, "prepare_threshold": 3},
            "CONN_MAX_AGE": None,
            "CONN_HEALTH_CHECKS": True,
        }


def _sqlite(path: Path) -> dict[str, object]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(path),
        "OPTIONS": {
            # Without IMMEDIATE a transaction that reads and then writes fails immediately instead of waiting for the lock.
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA busy_timeout=30000;",
        },
        "CONN_MAX_AGE": None,
    }
