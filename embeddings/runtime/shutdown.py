"""Whether this worker process is to stop: whoever waits for a provider looks here."""

from __future__ import annotations

from threading import Event

requested = Event()
