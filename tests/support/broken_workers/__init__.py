"""Celery applications with one mechanism broken, or that die at one step: `celery -A tests.support.broken_workers.<name>`.

Each is the product's own application, with one function swapped before the worker takes its first message.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
django.setup()


def die(*_: object, **__: object) -> NoReturn:
    """kill -9 of this very process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
