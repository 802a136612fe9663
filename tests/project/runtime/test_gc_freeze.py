"""What a process has loaded is left out of the garbage collector's full rounds: they would hold up its streams."""

import gc
import subprocess
import sys

from celery import signals

import project.celery  # noqa: F401 - connects its receivers
from project.local.processes import CHECKOUT

LEAST = 50_000


def test_a_worker_keeps_what_it_has_loaded_once_it_is_ready():
    before = gc.get_freeze_count()
    try:
        signals.worker_ready.send(sender=None)
        assert gc.get_freeze_count() - before > LEAST
    finally:
        gc.unfreeze()


def test_a_web_process_keeps_its_views_too_before_the_first_request():
    script = (
        "import gc, project.asgi\nfrom django.urls import get_resolver\n"
        "assert 'url_patterns' in vars(get_resolver())\nprint(gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert int(done.stdout) > LEAST
