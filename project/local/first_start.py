"""What `make up` needs before it serves: tables, somebody who may log in to the admin, and a provider to start with."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence

import django

_ADMIN = "admin"


def main(arguments: Sequence[str]) -> int:
    """`python -m project.local.first_start SITE_URL MODELS_URL`: prints the new admin's password, once."""
    site_url, models_url = arguments
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    from django.conf import settings
    from django.core.management import call_command

    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)
    call_command("migrate", verbosity=0, interactive=False)
    _make_provider(models_url)
    password = _make_admin()
    _say(f"admin: {site_url}/admin/")
    if password:
        _say(f"user {_ADMIN}, password {password}  (shown this once; `manage.py changepassword {_ADMIN}` sets another)")
    return 0


def _make_provider(models_url: str) -> None:
    from django.core.management import call_command

    from embeddings.models import Provider
    from project.local.model_server import CHAT_MODEL, EMBEDDING_MODEL

    if Provider.objects.exists():
        return
    models = ["--embedding-model", EMBEDDING_MODEL, "--chat-model", CHAT_MODEL]
    call_command("provider", "set", "local", "--kind", "openai-compatible", "--base-url", models_url, *models)


def _make_admin() -> str:
    """The password of the superuser that was made, or nothing where there is one."""
    from django.contrib.auth import get_user_model

    users = get_user_model()
    if users.objects.filter(is_superuser=True).exists():
        return ""
    password = secrets.token_urlsafe(12)
    users.objects.create_superuser(_ADMIN, "", password)
    return password


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
