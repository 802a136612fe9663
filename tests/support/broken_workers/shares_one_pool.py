"""Everything is done in Celery's own pool, as its messages come: calls, scans and housekeeping."""

from embeddings.runtime.bulkheads import Bulkhead
from project.celery import app
from tests.support.broken_workers import calls_hold_threads  # noqa: F401 (what it breaks is broken here, too)

Bulkhead.put = lambda self, work: self._do(work)

__all__ = ["app"]
