"""Dies with a reply in hand: its slot is free, its vectors are not stored."""

from embeddings import answers
from project.celery import app
from tests.broken_workers import die

answers._store_batch = die

__all__ = ["app"]
