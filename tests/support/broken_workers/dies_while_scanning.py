"""Dies in the middle of a scan: its first versions are written, the rest is not."""

from embeddings.knowledge import store
from embeddings.runs import scan
from project.celery import app
from tests.support.broken_workers import die

scan._BATCH_FILES = 2
_write_versions = store.write_versions


def _write_then_die(*arguments: object) -> None:
    _write_versions(*arguments)
    die()


store.write_versions = _write_then_die

__all__ = ["app"]
