"""The Sluicegate project: settings, entry points, and the runtime that both apps use."""

# Imported here, so that every process sends its wake-ups to this application's broker.
from project.celery import app as celery_app

__all__ = ["celery_app"]
