"""The interface between the queue and a model server, the same for every provider kind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Protocol

import numpy as np

from embeddings.errors import ProviderConfigurationError

if TYPE_CHECKING:
    from embeddings.models import Provider

# Sent where no key is configured: without one, the SDK would take a key from the environment.
NO_KEY = "not-needed"
ERROR_BODY_MAX = 300
# The deadline of a request that only asks whether a server is there.
LIST_DEADLINE_S = 2.0


@dataclass(frozen=True)
class EmbeddingCall:
    """One logical embedding call; its retries are further HTTP requests of the same call.

    `left` is set once the first request has been sent; `deadline_s` bounds each HTTP request as a whole. With
    `may_test_format`, a refused call may be sent again with another encoding. With `held`, no byte is sent before that
    event is set, and the deadline runs from then.
    """

    texts: Sequence[str]
    model: str
    is_interactive: bool
    deadline_s: float
    left: Event
    may_test_format: bool = False
    held: asyncio.Event | None = None


@dataclass(frozen=True)
class RawReply:
    """A reply as received; it is decoded after its slot is freed. `calls` counts HTTP requests."""

    body: bytes
    calls: int = 1


class EmbeddingProvider(Protocol):
    """One implementation for each kind. It translates the transport's errors into typed ones."""

    @property
    def refuses_base64(self) -> bool: ...

    async def retire(self) -> None:
        """Closes its connections once no call uses them."""
        ...

    async def embed(self, call: EmbeddingCall) -> RawReply:
        """Sends the texts. Raises ProviderTimeoutError or a ProviderError, each with its count of HTTP requests."""
        ...

    async def model_names(self) -> list[str]:
        """The models that the server lists, as it names them. Raises as `embed` does, within `LIST_DEADLINE_S`."""
        ...

    def decode(self, reply: RawReply, expected: int, dimensions: int | None) -> np.ndarray:
        """`float32[expected, dimensions]` in the order of the texts; raises ReplyRefused, ReplyNotFinite, DimensionMismatch."""
        ...


def api_key(provider: Provider) -> str:
    """The provider's key from the environment; raises ProviderConfigurationError naming the variable if it is not set."""
    if not provider.api_key_env:
        return NO_KEY
    key = os.environ.get(provider.api_key_env, "").strip()
    if not key:
        raise ProviderConfigurationError(
            f"provider {provider.name} takes its key from {provider.api_key_env}, which is not set", calls=0
        )
    return key


def bearer(key: str) -> dict[str, str]:
    """The key as a header; none where there is no key."""
    return {} if key == NO_KEY else {"Authorization": f"Bearer {key}"}


def scrubbed(body: str, *secrets: str) -> str:
    """A provider's message, fit for a row or a log: one line, bounded, without our key."""
    for secret in secrets:
        if secret and secret != NO_KEY:
            body = body.replace(secret, "***")
    line = " ".join("".join(c if c.isprintable() else " " for c in body[: ERROR_BODY_MAX * 4]).split())
    return line[:ERROR_BODY_MAX]
