"""Prepares the database for `make up`: tables, a superuser for the admin, and a first provider."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence

import django

from project.local.model_server import CHAT_MODEL, EMBEDDING_MODEL
from project.local.processes import say

_ADMIN = "admin"


def main(arguments: Sequence[str]) -> int:
    """`python -m project.local.first_start SITE_URL MODELS_URL`: prints the new admin's password, once."""
    site_url, models_url = arguments
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    from django.conf import settings
    from django.contrib.auth import get_user_model
    from django.core.management import call_command

    from embeddings.models import Provider

    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)
    call_command("migrate", verbosity=0, interactive=False)
    if not Provider.objects.exists():
        models = ["--embedding-model", EMBEDDING_MODEL, "--chat-model", CHAT_MODEL]
        call_command("provider", "set", "local", "--kind", "openai-compatible", "--base-url", models_url, *models)
    say(f"admin: {site_url}/admin/")
    users = get_user_model()
    if not users.objects.filter(is_superuser=True).exists():
        password = secrets.token_urlsafe(12)
        users.objects.create_superuser(_ADMIN, "", password)
        say(f"user {_ADMIN}, password {password}  (shown this once; `manage.py changepassword {_ADMIN}` sets another)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
