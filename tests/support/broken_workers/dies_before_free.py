"""Dies after the owner has heard of the timeout and before the slot is free."""

from embeddings.dispatch import task_queue
from project.celery import app
from tests.support.broken_workers import die

task_queue.fail = die

__all__ = ["app"]
