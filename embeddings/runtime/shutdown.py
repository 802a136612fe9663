"""Whether this worker process is to stop: code that waits for a provider polls this."""

from __future__ import annotations

from threading import Event

requested = Event()
