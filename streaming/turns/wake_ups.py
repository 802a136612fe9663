"""Celery's request of a chat wake-up: a message that is not acknowledged.

Its queue keeps no record of delivered messages (`no_ack` in the settings), but kombu's Redis transport acknowledges all the
same: two clients made and two transactions for each turn, a quarter of a start's cost in a worker (decision 12).
"""

from __future__ import annotations

from celery.worker.request import Request


class WakeUpRequest(Request):
    """Acknowledged from the start."""

    acknowledged = True
