"""Model servers by kind, behind one interface (`providers.base`)."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.utils.module_loading import import_string

from embeddings.providers.base import EmbeddingProvider
from embeddings.states import ProviderKind
from project.runtime import event_loop

if TYPE_CHECKING:
    from embeddings.models import Provider

# By name: importing an SDK takes longer than most commands run, and many of them call no provider.
_KINDS = {
    ProviderKind.OPENAI_COMPATIBLE: "embeddings.providers.openai_compatible.OpenAICompatibleProvider",
    ProviderKind.OLLAMA: "embeddings.providers.ollama.OllamaProvider",
    ProviderKind.GEMINI: "embeddings.providers.gemini.GeminiProvider",
}

_ADAPTERS_MAX = 64


@dataclass(frozen=True)
class _Kept:
    """An adapter and the configuration that it was made from."""

    made_from: tuple[int, str]
    adapter: EmbeddingProvider


_lock = threading.Lock()
# Keyed by process: a client does not survive a fork. Ordered by last use (LRU).
_adapters: dict[tuple[int, int], _Kept] = {}


def adapter_for(provider: Provider) -> EmbeddingProvider:
    """The provider's adapter in this process: one HTTP client per provider, made anew when its configuration changes.

    Raises ProviderConfigurationError when a key that it names is not set.
    """
    key = (os.getpid(), provider.pk)
    made_from = (provider.revision, provider.base_url)
    with _lock:
        kept = _adapters.pop(key, None)
        if kept is None or kept.made_from != made_from:
            if kept is not None:
                _retire(kept)
            kept = _Kept(made_from, import_string(_KINDS[ProviderKind(provider.kind)])(provider))
        _adapters[key] = kept
        while len(_adapters) > _ADAPTERS_MAX:
            _retire(_adapters.pop(next(iter(_adapters))))
        return kept.adapter


def _retire(kept: _Kept) -> None:
    event_loop.submit(kept.adapter.retire())
