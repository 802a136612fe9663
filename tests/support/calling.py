"""One embedding call through a provider's real adapter, without a queue or a database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

import numpy as np

from embeddings.models import Provider
from embeddings.providers.base import EmbeddingCall, EmbeddingProvider, RawReply
from project.runtime import event_loop
from tests.support.provider_server import ProviderServer
from tests.support.sweeps import GEMINI, KEY, OLLAMA, OPENAI

PATHS = {OPENAI: "/v1", OLLAMA: "", GEMINI: "/v1beta"}


def provider_at(address: str, kind: Any, **values: Any) -> Provider:
    """A provider that is in no database."""
    facts = {"name": "tried", "kind": kind, "base_url": address + PATHS[kind], "embedding_model": "embed"}
    return Provider(**facts | {"api_key_env": KEY if kind == GEMINI else ""} | values)


@contextmanager
def adapter(make: type[Any], provider: Provider) -> Iterator[Any]:
    """The adapter on this process's loop; its connections are closed at the end."""
    made = make(provider)
    try:
        yield made
    finally:
        event_loop.run(made.retire())


def call_of(
    texts: Sequence[str], *, is_interactive: bool = False, deadline_s: float = 10.0, **values: Any
) -> EmbeddingCall:
    facts = {"texts": texts, "model": "embed", "is_interactive": is_interactive, "deadline_s": deadline_s}
    return EmbeddingCall(**facts | {"left": Event()} | values)


def embed(made: EmbeddingProvider, *texts: str, **values: Any) -> tuple[np.ndarray, RawReply]:
    """The vectors, and the reply that they were read from."""
    reply = event_loop.run(made.embed(call_of(texts, **values)))
    return made.decode(reply, len(texts), None), reply


def only_call(server: ProviderServer) -> Any:
    (call,) = server.calls
    return call
