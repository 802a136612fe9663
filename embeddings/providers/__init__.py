"""Model servers by kind, behind one seam (`providers.base`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from embeddings.providers.base import EmbeddingProvider
from embeddings.providers.gemini import GeminiProvider
from embeddings.providers.ollama import OllamaProvider
from embeddings.providers.openai_compatible import OpenAICompatibleProvider
from embeddings.states import ProviderKind

if TYPE_CHECKING:
    from embeddings.models import Provider

_KINDS: dict[ProviderKind, Callable[[Provider], EmbeddingProvider]] = {
    ProviderKind.OPENAI_COMPATIBLE: OpenAICompatibleProvider,
    ProviderKind.OLLAMA: OllamaProvider,
    ProviderKind.GEMINI: GeminiProvider,
}

_lock = threading.Lock()
_adapters: dict[tuple[int, int, int], EmbeddingProvider] = {}
_ADAPTERS_MAX = 64


def adapter_for(provider: Provider) -> EmbeddingProvider:
    """The provider's adapter in this process: one HTTP client per provider, made anew when its configuration changes.

    Raises ProviderConfigurationError when a key that it names is not set.
    """
    key = (os.getpid(), provider.pk, provider.revision)
    with _lock:
        if key not in _adapters:
            while len(_adapters) >= _ADAPTERS_MAX:
                _adapters.pop(next(iter(_adapters)))
            _adapters[key] = _KINDS[ProviderKind(provider.kind)](provider)
        return _adapters[key]
