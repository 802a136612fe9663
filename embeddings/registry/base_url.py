"""Normalises base URLs, so that no server gets two lanes by two spellings (docs/architecture.md, Data and states)."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from django.core.exceptions import ValidationError

_LENGTH_MAX = 500
_DEFAULT_PORTS = {"http": 80, "https": 443}
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104 (compared, never bound)


def normalise_base_url(text: str) -> str:
    """The URL with scheme and host in lower case, without default port and trailing slash.

    Raises ValidationError for anything but http or https with a host, and for userinfo, query or fragment.
    """
    url = text.strip()
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ValidationError("A base URL has no spaces or control characters.")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValidationError("The base URL cannot be parsed: its host or port is not valid.") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValidationError("Use an http:// or https:// URL with a host, such as http://127.0.0.1:8089/v1.")
    if "@" in parts.netloc:
        raise ValidationError(
            "A base URL has no user name or password: name an environment variable with api_key_env instead."
        )
    if len(text) > _LENGTH_MAX:
        raise ValidationError(f"A base URL has at most {_LENGTH_MAX} characters.")
    if "?" in text or "#" in text:
        raise ValidationError("A base URL has no query and no fragment.")
    host = parts.hostname.rstrip(".")
    place = f"[{host}]" if ":" in host else host
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        place += f":{port}"
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), "", ""))


def same_server(one: str, other: str) -> bool:
    """Whether two normalised URLs name the same endpoint; `localhost`, `127.0.0.1` and `::1` are the same host."""
    return _identity(one) == _identity(other)


def _identity(url: str) -> tuple[str, str, int, str]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return (
        parts.scheme,
        "localhost" if host in _THIS_MACHINE else host,
        parts.port or _DEFAULT_PORTS.get(parts.scheme, 0),
        parts.path.rstrip("/"),
    )
