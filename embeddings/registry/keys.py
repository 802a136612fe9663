"""Tenants' API keys: `sgk_<prefix>_<secret>`, shown once, stored as a digest."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from datetime import timedelta

from django.db.models import Q, TextChoices
from django.db.models.functions import Now

from embeddings.errors import UsageError
from embeddings.models import Tenant, TenantApiKey

_MARK = "sgk"
_KEY = re.compile(_MARK + r"_(?P<prefix>[0-9a-f]{12})_[0-9a-f]{48}", re.ASCII)
_LABEL_CHARACTERS_MAX = 100
# Without it, a busy key would cost one write per request.
_LAST_USED_GRAIN = timedelta(minutes=1)


class KeyScope(TextChoices):
    """The groups of endpoints that a key may use."""

    CHAT = "chat"
    SEARCH = "search"
    RUNS = "runs"


def issue_key(tenant: Tenant, *, label: str = "", scopes: Collection[str] = ()) -> tuple[TenantApiKey, str]:
    """Creates a key; returns its row and the key itself, which is not stored. Without `scopes` it gets all of them.

    Raises UsageError.
    """
    if not tenant.is_active:
        raise UsageError(f"Tenant {tenant} is not active: `manage.py tenant add {tenant}` brings it back.")
    if len(label) > _LABEL_CHARACTERS_MAX or not label.isprintable():
        raise UsageError(f"A label has at most {_LABEL_CHARACTERS_MAX} printable characters.")
    if unknown := sorted(set(scopes) - set(KeyScope.values)):
        raise UsageError(f"There is no scope {unknown[0]!r}. There is: {', '.join(KeyScope.values)}.")
    prefix = secrets.token_hex(6)
    key = f"{_MARK}_{prefix}_{secrets.token_hex(24)}"
    granted = [scope for scope in KeyScope.values if scope in scopes or not scopes]
    row = TenantApiKey.objects.create(tenant=tenant, prefix=prefix, digest=_digest(key), label=label, scopes=granted)
    return row, key


def authenticate(key: str) -> TenantApiKey | None:
    """The key's row with its tenant and providers, or None. Digests are compared in constant time."""
    shape = _KEY.fullmatch(key)
    if shape is None:
        return None
    stale = Q(last_used_at=None) | Q(last_used_at__lt=Now() - _LAST_USED_GRAIN)
    keys = TenantApiKey.objects.select_related("tenant__embedding_provider", "tenant__chat_provider")
    try:
        # `first` would add a sort: a fifth of the cost of taking a turn.
        row = keys.annotate(was_unused=Q(stale)).get(prefix=shape["prefix"], revoked_at=None, tenant__is_active=True)
    except TenantApiKey.DoesNotExist:
        return None
    if not hmac.compare_digest(_digest(key), row.digest):
        return None
    if row.was_unused:
        TenantApiKey.objects.filter(stale, pk=row.pk).update(last_used_at=Now())
    return row


def allows(key: TenantApiKey, scope: str) -> bool:
    """Whether the key has this scope."""
    return scope in key.scopes


def find_key(prefix: str) -> TenantApiKey:
    """The key with this prefix; a whole key works too. Raises UsageError."""
    wanted = prefix.removeprefix(f"{_MARK}_").partition("_")[0]
    found = TenantApiKey.objects.select_related("tenant").filter(prefix=wanted).first()
    if found is None:
        raise UsageError("There is no key with this prefix: `manage.py key list` shows the prefixes.")
    return found


def revoke_key(key: TenantApiKey) -> bool:
    """Revokes the key. Whether this changed anything."""
    return bool(TenantApiKey.objects.filter(pk=key.pk, revoked_at=None).update(revoked_at=Now()))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
