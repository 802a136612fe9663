"""Errors that Django itself answers on the API's paths, in OpenAI's format: no such endpoint, or no such method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.utils.decorators import sync_and_async_middleware

from streaming.http.openai_shape import OpenAIError

_API = ("/v1/", "/api/")
_CODES = {404: "not_found", 405: "method_not_allowed"}


@sync_and_async_middleware
def in_openai_shape(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Middleware: an error of an API path that is no JSON becomes an error object. `Allow` stays."""
    if not iscoroutinefunction(get_response):
        return lambda request: _shaped(request, get_response(request))

    async def respond(request: HttpRequest) -> HttpResponseBase:
        return _shaped(request, await get_response(request))

    return respond


def _shaped(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    is_page = not request.path_info.startswith(_API) or response.headers.get("Content-Type", "").startswith(
        "application/json"
    )
    if response.status_code < 400 or is_page:
        return response
    status = response.status_code
    message = f"{response.reason_phrase}: {request.method} {request.path_info[:200]}"
    kind = "invalid_request_error" if status < 500 else "api_error"
    error = OpenAIError(status, message, kind, _CODES.get(status, "http_error"), may_retry=status >= 500)
    headers = error.headers() | ({"Allow": response.headers["Allow"]} if "Allow" in response.headers else {})
    return JsonResponse(error.body(), status=status, headers=headers)
