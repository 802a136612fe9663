"""Django's middleware for pages alone: the admin needs sessions and forms, the API's calls carry a key.

Each of these classes would otherwise take every call of the API through two threads, which is most of what such a call
costs.
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
    """Whether a call of the API is asked for rather than a page."""
    return path.startswith(_CALLS)


class _ForPages:
    """In front of a middleware of Django's: leaves it out where no page is asked for."""

    get_response: Any

    def __call__(self, request: HttpRequest) -> Any:
        if not self._is_asynchronous() and is_call(request.path_info):
            return self.get_response(request)
        return super().__call__(request)  # type: ignore[misc]  # the middleware behind this mixin

    async def __acall__(self, request: HttpRequest) -> Any:
        if is_call(request.path_info):
            return await self.get_response(request)
        return await super().__acall__(request)  # type: ignore[misc]  # the middleware behind this mixin

    def _is_asynchronous(self) -> bool:
        return bool(self.async_mode)  # type: ignore[attr-defined]  # set by Django's own mixin


class Security(_ForPages, SecurityMiddleware):
    pass


class Session(_ForPages, SessionMiddleware):
    pass


class Common(_ForPages, CommonMiddleware):
    pass


class Csrf(_ForPages, CsrfViewMiddleware):
    async def process_view(  # type: ignore[override]  # Django takes either, and adapts neither where both ends agree
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
