"""The embeddings app: sweeps, the lane, the circuit and the knowledge base."""

from django.apps import AppConfig


class EmbeddingsConfig(AppConfig):
    name = "embeddings"
    verbose_name = "Knowledge base"

    def ready(self) -> None:
        from embeddings import checks  # noqa: F401  (registers the system checks)
