"""A thread waits for each call that is out."""

from embeddings import tasks
from embeddings.runs import sweep
from project.celery import app

tasks.begin_drain = sweep.drain

__all__ = ["app"]
