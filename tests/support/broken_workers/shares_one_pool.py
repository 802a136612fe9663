"""Everything is done in Celery's own pool, as its messages come: calls, scans and housekeeping."""

from embeddings.runtime.bulkheads import Bulkhead
from project.celery import app

Bulkhead.put = lambda self, work: self._do(work)

__all__ = ["app"]
