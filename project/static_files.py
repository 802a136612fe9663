"""WhiteNoise for static files only, so that no other request passes through its thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware
from whitenoise.middleware import WhiteNoiseMiddleware  # type: ignore[import-untyped]


@sync_and_async_middleware
def static_files(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Middleware: serves the files under STATIC_URL with WhiteNoise, which supports only synchronous handlers."""
    nothing = object()
    # WhiteNoise warns about a missing folder, although its finders need none.
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)
    whitenoise = WhiteNoiseMiddleware(lambda request: nothing)

    def served(request: HttpRequest) -> Any:
        return whitenoise(request) if request.path_info.startswith(settings.STATIC_URL) else nothing

    if not iscoroutinefunction(get_response):

        def middleware(request: HttpRequest) -> Any:
            response = served(request)
            return get_response(request) if response is nothing else response

        return middleware

    async def async_middleware(request: HttpRequest) -> Any:
        response = nothing
        if request.path_info.startswith(settings.STATIC_URL):
            response = await sync_to_async(served)(request)
        return await get_response(request) if response is nothing else response

    return async_middleware
