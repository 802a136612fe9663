"""Calls to the API from browsers' pages of other origins (CORS), for the origins that CORS_ALLOWED_ORIGINS lists.

The outermost layer of the application, so that refusals of oversized bodies are readable to a page as well. Pages of
the admin are never readable to another origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from project.bounded_bodies import App, Receive, Scope, Send

_API = ("/v1/", "/api/")
# What a client reads of an answer beside its body.
_READABLE_HEADERS = ("Retry-After", "X-Should-Retry")


def with_cors(app: App, origins: Sequence[str]) -> App:
    """The application with CORS for these origins: preflight answered without a key, any request header allowed.

    No cookie is accepted: a page sends its tenant's key itself.
    """
    if not origins:
        return app
    allowed: Any = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=_READABLE_HEADERS,
    )

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(_API)
        await (allowed if is_api else app)(scope, receive, send)

    return routed
