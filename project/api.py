"""The HTTP API: the routers of both apps, and the one place that turns errors into replies, in OpenAI's shape."""

from __future__ import annotations

import json
import logging
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.parser import Parser

from embeddings.api import router as embeddings_router
from embeddings.errors import (
    EmbeddingFailed,
    ProviderBusy,
    ProviderError,
    SluicegateError,
    TaskExpired,
    TaskRemoved,
    TextRefused,
    UsageError,
)
from embeddings.registry.access import KeyLacksScope, KeyRefused, NotFound
from embeddings.timeouts import ProviderTimeoutError, is_provider_timeout
from project.runtime.error_place import place_of
from streaming.api import chat, openai
from streaming.http.openai_shape import OpenAIError
from streaming.refusals import TooManyTurns, TurnRefused, UnknownConversation, UnknownModel
from streaming.upstream import strict_json

logger = logging.getLogger(__name__)


class StrictParser(Parser):
    """Refuses what no database would take, before anything is made of it: it is the client's mistake, not ours."""

    def parse_body(self, request: HttpRequest) -> Any:
        return strict_json.parse(request.body)


api = NinjaAPI(
    parser=StrictParser(),
    title="Sluicegate",
    version="1",
    description="Chat over tenants' knowledge bases, sweeps and search. Every call carries a tenant's key as its bearer.",
    docs_url="/api/docs",
    openapi_url="/api/openapi.json",
    urls_namespace="api",
)
api.add_router("/v1", openai)
api.add_router("/api/chat", chat)
api.add_router("/api", embeddings_router)

# The first class that fits decides. Refusals of a provider's that we tried again are not the client's to try again.
_STATUSES: tuple[tuple[type[SluicegateError], int, str], ...] = (
    (KeyRefused, 401, "authentication_error"),
    (KeyLacksScope, 403, "permission_error"),
    (NotFound, 404, "invalid_request_error"),
    (UnknownModel, 404, "invalid_request_error"),
    (UnknownConversation, 404, "invalid_request_error"),
    (TooManyTurns, 429, "rate_limit_error"),
    (TurnRefused, 400, "invalid_request_error"),
    (UsageError, 400, "invalid_request_error"),
    (TaskExpired, 503, "api_error"),
    (TaskRemoved, 503, "api_error"),
    (ProviderBusy, 503, "api_error"),
    (TextRefused, 400, "invalid_request_error"),
    (ProviderError, 502, "api_error"),
    (EmbeddingFailed, 502, "api_error"),
)


@api.exception_handler(SluicegateError)
@api.exception_handler(ProviderTimeoutError)
def _on_own_error(request: HttpRequest, error: Exception) -> HttpResponse:
    code = str(getattr(error, "code", type(error).__name__))
    if is_provider_timeout(error):
        return _reply(OpenAIError(504, str(error), "timeout_error", code, may_retry=False))
    for kind, status, shape in _STATUSES:
        if isinstance(error, kind):
            param = getattr(error, "param", None)
            retry_after_ms = 1_000 if status in (429, 503) else None
            return _reply(OpenAIError(status, str(error), shape, code, param, retry_after_ms, status != 502))
    return _on_any_error(request, error)


@api.exception_handler(AuthenticationError)
def _on_no_key(request: HttpRequest, error: Exception) -> HttpResponse:
    message = "Send your API key as `Authorization: Bearer ...`."
    return _reply(OpenAIError(401, message, "authentication_error", KeyRefused.code))


@api.exception_handler(ValidationError)
def _on_invalid_field(request: HttpRequest, error: ValidationError) -> HttpResponse:
    """The first field at fault by its name; what was sent is not echoed."""
    first = error.errors[0]
    # The kind of parameter leads the path, and for a body the name that our own function gives it.
    path = first["loc"][2 if first["loc"][:2] == ("body", "body") else 1 :]
    # What follows a field of several types is the name of one of them, which says nothing to a client.
    path = path[: path.index("content") + 1] if "content" in path else path
    param = ".".join(map(str, path)) or None
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    return _reply(OpenAIError(400, message, "invalid_request_error", "invalid_value", param))


@api.exception_handler(HttpError)
def _on_http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    if isinstance(error.__cause__, ValueError | RecursionError):
        message = f"The request's body is not JSON that is taken here: {_fault_of(error.__cause__)}."
        return _reply(OpenAIError(400, message, "invalid_request_error", "invalid_json"))
    kind = "invalid_request_error" if error.status_code < 500 else "api_error"
    return _reply(OpenAIError(error.status_code, error.message, kind, "http_error"))


@api.exception_handler(Http404)
def _on_missing(request: HttpRequest, error: Http404) -> HttpResponse:
    return _reply(OpenAIError(404, "There is no such thing.", "invalid_request_error", "not_found"))


@api.exception_handler(Exception)
def _on_any_error(request: HttpRequest, error: Exception) -> HttpResponse:
    logger.error("%s %s failed: %s", request.method, request.path, place_of(error))
    return _reply(OpenAIError(500, "Internal server error.", "api_error", "internal_error"))


def _fault_of(error: BaseException) -> str:
    """What is wrong with a body, without a word of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, at character {error.pos}"
    return "it is not UTF-8" if isinstance(error, UnicodeError) else str(error)


def _reply(error: OpenAIError) -> HttpResponse:
    body: dict[str, Any] = error.body()
    return JsonResponse(body, status=error.status, headers=error.headers())
