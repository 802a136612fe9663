"""Authenticates a tenant by its key, sent as a bearer token (docs/architecture.md, Guarantees: G12)."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja.security import HttpBearer

from embeddings.errors import SluicegateError
from embeddings.models import Tenant
from embeddings.registry import KeyScope, allows, authenticate
from project.runtime.database_threads import in_database, in_fifo


class KeyRefused(SluicegateError):
    """The key is unknown, revoked, or of a tenant that is not active."""

    code = "invalid_api_key"


class KeyLacksScope(SluicegateError):
    """The key lacks the endpoint's scope."""

    code = "insufficient_scope"


class NotFound(SluicegateError):
    """The tenant has no such object. The reply does not reveal whether another tenant has one."""

    code = "not_found"


class TenantKey(HttpBearer):
    """`request.auth` becomes the Tenant whose key was sent, with its providers. Raises KeyRefused, KeyLacksScope.

    `starts`: the endpoint starts a turn, so its key is looked up in the FIFO executor, where the turn is stored next.
    """

    def __init__(self, scope: KeyScope, *, starts: bool = False) -> None:
        self.scope = scope
        self._ask = in_fifo if starts else in_database
        super().__init__()

    async def authenticate(self, request: HttpRequest, token: str) -> Tenant:
        key = await self._ask(authenticate, token)
        if key is None:
            raise KeyRefused("The API key is not valid.")
        if not allows(key, self.scope):
            raise KeyLacksScope(f"This API key does not have the scope {self.scope.value!r}.")
        return key.tenant


def caller(request: Any) -> Tenant:
    """The tenant that `TenantKey` authenticated."""
    tenant: Tenant = request.auth
    return tenant
