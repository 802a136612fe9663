"""What the lane and the drain need of a model server, whatever its kind."""

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

# Sent where no key is configured: an SDK left without one looks for keys of its own in the environment.
NO_KEY = "not-needed"
ERROR_BODY_MAX = 300
# What only asks whether a server is there does not wait as a call does.
LIST_DEADLINE_S = 2.0


@dataclass(frozen=True)
class EmbeddingCall:
    """One logical embedding call: retries within it count as its HTTP requests.

    `left` is set once the first request's bytes are out; `deadline_s` bounds each HTTP request as a whole. A refusal of a
    call that `may_test_format` may be answered by asking for another encoding. Nothing of a call that is `held` goes on
    the wire before that is set, and its deadline runs from then.
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
    """A reply as it came over the wire; decoding waits until the slot is free. `calls` counts HTTP requests."""

    body: bytes
    calls: int = 1


class EmbeddingProvider(Protocol):
    """The seam: one implementation a kind. Errors are typed here, `from` the transport's own."""

    @property
    def refuses_base64(self) -> bool: ...

    async def retire(self) -> None:
        """Closes its connections, once no call is out on them."""
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
    """A provider's own words, fit for a row or a log: one line, bounded, without our key."""
    for secret in secrets:
        if secret and secret != NO_KEY:
            body = body.replace(secret, "***")
    line = " ".join("".join(c if c.isprintable() else " " for c in body[: ERROR_BODY_MAX * 4]).split())
    return line[:ERROR_BODY_MAX]
