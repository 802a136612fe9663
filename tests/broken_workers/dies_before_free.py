"""Dies after the owner has heard of the timeout and before the slot is free."""

from embeddings import task_queue
from project.celery import app
from tests.broken_workers import die

task_queue.fail = die

__all__ = ["app"]
