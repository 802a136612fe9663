"""Its host's clock is 20 s ahead the database's."""

from project.celery import app
from tests.support import broken_workers  # noqa: F401 (sets Django up)
from tests.support.skewed_clock import skew

skew(20)

__all__ = ["app"]
