"""The ASGI entry point, run by uvicorn with the options of the Procfile's `web`."""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler

from project.bounded_bodies import bounded_bodies
from project.cors import with_cors

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
django.setup(set_prefix=False)

from django.urls import get_resolver  # noqa: E402 - needs the apps

from project.page_middleware import is_call  # noqa: E402 - needs the apps
from project.runtime.gc_freeze import keep_what_is_loaded  # noqa: E402


class _Handler(ASGIHandler):
    """Django's handler without a thread per API call: their only synchronous code is Django's signals."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and is_call(scope["path"]):
            await self.handle(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


application = with_cors(bounded_bodies(_Handler(), settings.CHAT_REQUEST_BYTES_MAX), settings.CORS_ALLOWED_ORIGINS)

# Import every view now rather than during the first request.
get_resolver().url_patterns  # noqa: B018
keep_what_is_loaded()
