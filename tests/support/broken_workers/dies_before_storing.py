"""Dies with a reply in hand: its slot is free, its vectors are not stored."""

from embeddings.dispatch import reply_storage
from project.celery import app
from tests.support.broken_workers import die

reply_storage._store_batch = die

__all__ = ["app"]
