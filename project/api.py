"""The HTTP API: the routers of both apps, and the mapping of errors to replies in OpenAI's format."""

from __future__ import annotations

import json
import logging
from typing import Any

from django.db import InterfaceError, OperationalError
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
from streaming.http.error_words import without_errno
from streaming.http.openai_shape import OpenAIError
from streaming.refusals import TooManyTurns, TurnRefused, UnknownConversation, UnknownModel
from streaming.upstream import strict_json

logger = logging.getLogger(__name__)


class StrictParser(Parser):
    """Refuses JSON that a database cannot store: a client's error must not become a 500."""

    def parse_body(self, request: HttpRequest) -> Any:
        return strict_json.parse(request.body)


api = NinjaAPI(
    parser=StrictParser(),
    title="Sluicegate",
    version="1",
    description="Chat over tenants' knowledge bases, sweeps and search. Every call needs a tenant's key as bearer token.",
    docs_url="/api/docs",
    openapi_url="/api/openapi.json",
    urls_namespace="api",
)
api.add_router("/v1", openai)
api.add_router("/api/chat", chat)
api.add_router("/api", embeddings_router)

DATABASE_RETRY_MS = 2_000

# The first matching class decides. A provider's error (502) was retried here: the client must not retry it.
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
    if request.path.startswith("/v1/"):
        code = without_errno(code)
    if is_provider_timeout(error):
        return _reply(OpenAIError(504, str(error), "timeout_error", code, may_retry=False))
    for kind, status, shape in _STATUSES:
        if isinstance(error, kind):
            param = getattr(error, "param", None)
            retry_after_ms = 1_000 if status in (429, 503) else None
            return _reply(OpenAIError(status, str(error), shape, code, param, retry_after_ms, status != 502))
    return _on_any_error(request, error)


@api.exception_handler(OperationalError)
@api.exception_handler(InterfaceError)
def _on_database_away(request: HttpRequest, error: Exception) -> HttpResponse:
    logger.error("%s %s: the database is away: %s", request.method, request.path, place_of(error))
    message = "The database does not answer: try again in a moment."
    return _reply(OpenAIError(503, message, "api_error", "database_unavailable", retry_after_ms=DATABASE_RETRY_MS))


@api.exception_handler(AuthenticationError)
def _on_no_key(request: HttpRequest, error: Exception) -> HttpResponse:
    message = "Send your API key as `Authorization: Bearer ...`."
    return _reply(OpenAIError(401, message, "authentication_error", KeyRefused.code))


@api.exception_handler(ValidationError)
def _on_invalid_field(request: HttpRequest, error: ValidationError) -> HttpResponse:
    """Names the first invalid field; does not repeat its value."""
    first = error.errors[0]
    # The path starts with the kind of parameter and, for a body, the name of the view's argument.
    path = first["loc"][2 if first["loc"][:2] == ("body", "body") else 1 :]
    # After a field of several types comes the name of one of the types, of no use to a client.
    path = path[: path.index("content") + 1] if "content" in path else path
    param = ".".join(map(str, path)) or None
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    return _reply(OpenAIError(400, message, "invalid_request_error", "invalid_value", param))


@api.exception_handler(HttpError)
def _on_http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    if isinstance(error.__cause__, ValueError | RecursionError):
        # The message must not repeat the body.
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError):
            fault = f"{cause.msg}, at character {cause.pos}"
        else:
            fault = "it is not UTF-8" if isinstance(cause, UnicodeError) else str(cause)
        message = f"The request's body is not JSON that is accepted here: {fault}."
        return _reply(OpenAIError(400, message, "invalid_request_error", "invalid_json"))
    kind = "invalid_request_error" if error.status_code < 500 else "api_error"
    return _reply(OpenAIError(error.status_code, error.message, kind, "http_error"))


@api.exception_handler(Http404)
def _on_missing(request: HttpRequest, error: Http404) -> HttpResponse:
    return _reply(OpenAIError(404, "Not found.", "invalid_request_error", "not_found"))


@api.exception_handler(Exception)
def _on_any_error(request: HttpRequest, error: Exception) -> HttpResponse:
    logger.error("%s %s failed: %s", request.method, request.path, place_of(error))
    return _reply(OpenAIError(500, "Internal server error.", "api_error", "internal_error"))


def _reply(error: OpenAIError) -> HttpResponse:
    body: dict[str, Any] = error.body()
    return JsonResponse(body, status=error.status, headers=error.headers())
