"""Dies inside the transaction that stores, with every vector written and nothing committed."""

from embeddings.knowledge import store
from project.celery import app
from tests.support.broken_workers import die

store._publish_complete = die

__all__ = ["app"]
