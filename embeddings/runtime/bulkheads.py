"""A worker's threads, apart for each kind of work: none of it waits for another kind (decision 19).

Celery's pool hands its wake-ups over and is free again at once. Otherwise hung sources or servers would fill it, and keep
beat's work from it, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from django.conf import settings
from django.db import close_old_connections, connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)


class Bulkhead:
    """At most `threads` threads for one kind of work, which are started as they are needed."""

    def __init__(self, name: str, threads: int, *, keeps_connections: bool = False) -> None:
        self.threads = threads
        self._name = name
        self._keeps_connections = keeps_connections
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: set[Hashable] = set()
        self._kept: set[BaseDatabaseWrapper] = set()

    @property
    def has_ended(self) -> bool:
        """Whether nothing was put since the last `end`."""
        return self._pool is None

    def wake(self, key: Hashable, work: Callable[[], object]) -> None:
        """Does the work for which a wake-up came; nothing where that of the same key waits already.

        So a backlog of wake-ups never grows beyond what there is to do.
        """

        def begin() -> None:
            with self._lock:
                if key not in self._waiting:
                    return
                self._waiting.discard(key)
            work()

        with self._lock:
            if key in self._waiting:
                return
            self._waiting.add(key)
        self.put(begin)

    def put(self, work: Callable[[], object]) -> None:
        """Does the work in one of the threads, the oldest first. What it raises is logged."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=f"sluicegate-{self._name}")
            self._pool.submit(self._do, work)

    def end(self) -> None:
        """Does what was put, drops the wake-ups that wait (rows are the truth), and closes the threads' connections."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._waiting.clear()
        if pool is None:
            return
        pool.shutdown(wait=True)
        with self._lock:
            kept, self._kept = self._kept, set()
        for connection in kept:
            # The thread that opened it has ended.
            connection.inc_thread_sharing()
            connection.close()

    def _do(self, work: Callable[[], object]) -> None:
        close_old_connections()
        try:
            work()
        except Exception:
            # Whatever a piece of work raises ends that piece alone; the rows say what is left to do.
            logger.exception("a piece of work failed: %s", self._name)
        finally:
            if self._keeps_connections:
                with self._lock:
                    self._kept.update(connections.all(initialized_only=True))
            else:
                connections.close_all()


# As many as the worker's `--concurrency` (project/celery.py).
DRAINS = Bulkhead("drains", settings.CELERY_WORKER_CONCURRENCY, keeps_connections=True)
SCANS = Bulkhead("scans", settings.SCAN_THREADS)
ROUNDS = Bulkhead("rounds", 1)
# A purge may last for longer than a round may be late.
PURGES = Bulkhead("purges", 1)
