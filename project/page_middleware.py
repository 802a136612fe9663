"""Django's middleware for pages only: the admin needs sessions and forms, API calls need neither.

Without these classes each middleware sends every API call through threads: 1.5 times the CPU of a call
(docs/decisions/0013-pages-alone-have-middleware.md).
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.middleware import AuthenticationMiddleware
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest
from django.middleware.clickjacking import XFrameOptionsMiddleware
from django.middleware.common import CommonMiddleware
from django.middleware.csrf import CsrfViewMiddleware
from django.middleware.security import SecurityMiddleware

_CALLS = ("/v1/", "/api/chat/", "/api/runs", "/api/search", "/healthz", "/readyz", "/metrics")


def is_call(path: str) -> bool:
    """Whether the path is an API endpoint rather than a page."""
    return path.startswith(_CALLS)


class _ForPages:
    """Mixin before one of Django's middlewares: skips it for API calls."""

    get_response: Any
    async_mode: bool

    def __call__(self, request: HttpRequest) -> Any:
        # Django's own mixin sets `async_mode`.
        if not self.async_mode and is_call(request.path_info):
            return self.get_response(request)
        return super().__call__(request)  # type: ignore[misc]  # the middleware behind this mixin

    async def __acall__(self, request: HttpRequest) -> Any:
        if is_call(request.path_info):
            return await self.get_response(request)
        return await super().__acall__(request)  # type: ignore[misc]  # the middleware behind this mixin


class Security(_ForPages, SecurityMiddleware):
    pass


class Session(_ForPages, SessionMiddleware):
    pass


class Common(_ForPages, CommonMiddleware):
    pass


class Csrf(_ForPages, CsrfViewMiddleware):
    async def process_view(  # type: ignore[override]  # Django accepts a coroutine function here
        self, request: HttpRequest, callback: Any, arguments: Any, keywords: Any
    ) -> Any:
        if is_call(request.path_info):
            return None
        return await sync_to_async(super().process_view)(request, callback, arguments, keywords)


class Authentication(_ForPages, AuthenticationMiddleware):
    pass


class Messages(_ForPages, MessageMiddleware):
    pass


class XFrameOptions(_ForPages, XFrameOptionsMiddleware):
    pass
