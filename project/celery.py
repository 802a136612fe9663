"""The Celery application. Messages are doorbells: losing one loses nothing, a duplicate does nothing."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

app = Celery("sluicegate")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
