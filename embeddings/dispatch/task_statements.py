"""The statements of the task queue, as text, and running them.

Composing a query through the ORM costs fifteen times what running it does, and these run once a batch. They are the same
text on SQLite and PostgreSQL but for the clock and the lock. Times are the database's own, so that several machines agree
on leases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connection

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper


def execute(cursor: CursorWrapper, statement: str, *, ahead_ms: int = 0, **values: Any) -> int:
    """Runs a statement with its clock and lock filled in for this database; returns the affected rows."""
    waits = (ahead_ms, settings.LEASE_MS, -settings.LANE_BATCH_MAX_WAIT_MS)
    cursor.execute(_filled(statement, connection.vendor, *waits), values)
    return int(cursor.rowcount)


@lru_cache(maxsize=256)
def _filled(statement: str, vendor: str, ahead_ms: int, lease_ms: int, overtaken_ms: int) -> str:
    return statement.format(
        now=now(),
        ahead=now(ahead_ms),
        lease=now(lease_ms),
        overtaken=now(overtaken_ms),
        lock=lock(),
        # SQLite's own clock counts milliseconds; turns are taken in less. It has one machine, so ours is the same clock.
        instant="clock_timestamp()" if vendor == "postgresql" else "%(instant)s",
        # What is admitted or settled may be lost with a crash of the database itself: at worst a batch is bought twice.
        relax=", set_config('synchronous_commit', 'off', true)" if vendor == "postgresql" else "",
    )


def now(plus_ms: int = 0) -> str:
    """The database's clock as an expression, `plus_ms` from now."""
    if connection.vendor == "postgresql":
        return f"(clock_timestamp() + interval '{int(plus_ms)} milliseconds')"
    return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', '{int(plus_ms) / 1000:+.3f} seconds')"


def lock() -> str:
    """What a SELECT ends with to lock its rows until the transaction ends; SQLite's transactions lock by themselves."""
    # Plain FOR UPDATE would queue behind every put: inserting a task shares a lock on its provider and run.
    return "FOR NO KEY UPDATE" if connection.vendor == "postgresql" else ""


TASK = "embeddings_embeddingtask"
HELD = "WHERE id = %(task)s AND dispatch_token = %(token)s AND state IN (1, 2)"

READ_GATE = """
SELECT is_paused, busy_until IS NOT NULL AND busy_until > {now}, overtaken_since IS NOT NULL AND overtaken_since <= {overtaken},
  overtaken_since IS NOT NULL, max_in_flight"""
LOCK_PROVIDER = f"{READ_GATE} FROM embeddings_provider WHERE id = %(provider)s {{lock}}"
LOCK_TO_ADMIT = f"{READ_GATE} {{relax}} FROM embeddings_provider WHERE id = %(provider)s {{lock}}"
PROVIDER_BUSY = "UPDATE embeddings_provider SET busy_until = {ahead} WHERE id = %(provider)s"
TAKEN_SLOTS = f"SELECT slot FROM {TASK} WHERE provider_id = %(provider)s AND slot IS NOT NULL"
PICK_ANY = f"""
SELECT t.id, t.generation_id, t.priority, t.run_id, t.outcome_id, t.split_from_id FROM {TASK} t
JOIN embeddings_embeddinggeneration g ON g.id = t.generation_id
JOIN embeddings_provider p ON p.id = t.provider_id
LEFT JOIN embeddings_tenantrun r ON r.id = t.run_id
LEFT JOIN embeddings_repositoryoutcome o ON o.id = t.outcome_id
WHERE t.provider_id = %(provider)s AND t.state = 0 AND t.priority <= %(batch_least)s
  AND (t.expires_at IS NULL OR t.expires_at > {{now}})
  AND (t.run_id IS NULL OR (r.dispatch_allowed AND g.model = p.embedding_model))
ORDER BY """
BY_ORDER = {"fair": "o.last_dispatched_at ASC NULLS FIRST, t.id", "fifo": "t.id"}
PICK = {
    (order, batch_first): f"{PICK_ANY} t.priority {'DESC' if batch_first else 'ASC'}, {by} LIMIT 1"
    for order, by in BY_ORDER.items()
    for batch_first in (False, True)
}
DISPATCH = f"""
UPDATE {TASK} SET state = 1, slot = %(slot)s, dispatch_token = %(token)s, lease_expires_at = {{lease}},
  dispatched_at = {{now}}, attempts = attempts + 1, call_ended_at = NULL, call_ended_by = ''
WHERE id = %(task)s AND state = 0"""
COUNT_DISPATCH = """
UPDATE embeddings_repositoryoutcome SET last_dispatched_at = {instant}, provider_calls = provider_calls + 1
WHERE id = %(outcome)s"""
COUNT_CALLS = """
UPDATE embeddings_repositoryoutcome SET provider_calls = provider_calls + %(further)s WHERE id = %(outcome)s"""
OVERTAKING = f"""
UPDATE embeddings_provider SET overtaken_since = CASE
  WHEN EXISTS (SELECT 1 FROM {TASK} t WHERE t.provider_id = %(provider)s AND t.state = 0 AND t.priority = 1)
  THEN COALESCE(overtaken_since, {{now}}) END WHERE id = %(provider)s"""
NOT_OVERTAKEN = """
UPDATE embeddings_provider SET overtaken_since = NULL WHERE id = %(provider)s AND overtaken_since IS NOT NULL"""
# One look for each index: a single condition over all tasks of a provider would read its whole history.
HAS_LOST = f"""(EXISTS (SELECT 1 FROM {TASK} l WHERE l.provider_id = %(provider)s AND l.state IN (1, 2)
    AND l.lease_expires_at < {{now}})
  OR EXISTS (SELECT 1 FROM {TASK} l WHERE l.provider_id = %(provider)s AND l.slot IS NOT NULL
    AND l.lease_expires_at < {{now}}))"""
HAS_WORK = f"""
SELECT 1 WHERE {HAS_LOST} OR EXISTS (SELECT 1 FROM {TASK} q WHERE q.provider_id = %(provider)s AND q.state = 0)"""
STANDS_IDLE = f"""
SELECT 1 FROM embeddings_provider p WHERE p.id = %(provider)s AND ({HAS_LOST}
  OR (NOT p.is_paused AND EXISTS (SELECT 1 FROM {TASK} q WHERE q.provider_id = %(provider)s AND q.state = 0
      AND (q.priority = 0 OR p.busy_until IS NULL OR p.busy_until <= {{now}}))
    AND (p.max_in_flight < 1
      OR (SELECT COUNT(*) FROM {TASK} s WHERE s.provider_id = %(provider)s AND s.slot IS NOT NULL) < p.max_in_flight)))"""
SETTLE = f"""
UPDATE {TASK} SET state = %(answered)s, slot = NULL, lease_expires_at = {{lease}}, call_ended_at = {{now}},
  call_ended_by = 'reply' WHERE id = %(task)s AND dispatch_token = %(token)s AND state = 1"""
RENEW = f"""
UPDATE {TASK} SET lease_expires_at = {{lease}}
WHERE id = %(task)s AND dispatch_token = %(token)s AND (state IN (1, 2) OR slot IS NOT NULL)"""
END = f"""
UPDATE {TASK} SET state = %(state)s, slot = NULL, settled_at = {{now}}, error_code = %(code)s, error_detail = %(detail)s,
  call_ended_at = COALESCE(call_ended_at, {{now}}),
  call_ended_by = CASE call_ended_by WHEN '' THEN %(ended_by)s ELSE call_ended_by END {HELD}"""
FAIL_QUEUED = f"""
UPDATE {TASK} SET state = 4, settled_at = {{now}}, error_code = %(code)s, error_detail = %(detail)s
WHERE id = %(task)s AND state = 0"""
RELEASE_SLOT = f"""
UPDATE {TASK} SET slot = NULL, call_ended_at = {{now}}, call_ended_by = 'late'
WHERE id = %(task)s AND dispatch_token = %(token)s AND state = 5 AND slot IS NOT NULL"""
STORED = f"""
UPDATE {TASK} SET state = 3, settled_at = {{now}} WHERE id = %(task)s AND dispatch_token = %(token)s AND state = 2"""
REQUEUE_BUSY = f"""
UPDATE {TASK} SET state = 0, slot = NULL, dispatch_token = '', busy_requeues = busy_requeues + 1,
  busy_since = COALESCE(busy_since, {{now}}), call_ended_at = {{now}}, call_ended_by = 'busy' {HELD}"""
GIVE_BACK = f"""
UPDATE {TASK} SET state = 0, slot = NULL, dispatch_token = '', attempts = attempts - 1, call_ended_at = {{now}},
  call_ended_by = 'shutdown' {HELD}"""
EXPIRE = f"""
UPDATE {TASK} SET state = 5, error_code = %(reason)s, settled_at = {{now}}
WHERE provider_id = %(provider)s AND state = 0 AND expires_at IS NOT NULL AND expires_at <= {{now}}"""
FREE_ABANDONED_SLOTS = f"""
UPDATE {TASK} SET slot = NULL, call_ended_at = {{now}}, call_ended_by = 'lost'
WHERE provider_id = %(provider)s AND slot IS NOT NULL AND state > 2 AND lease_expires_at < {{now}}"""
LOST = f"""
SELECT id, run_id, losses FROM {TASK}
WHERE provider_id = %(provider)s AND state IN (1, 2) AND lease_expires_at < {{now}} ORDER BY id"""
LOSE = """state IN (1, 2) AND lease_expires_at < {now}"""
LOSE_TO_QUEUE = f"""
UPDATE {TASK} SET state = 0, slot = NULL, dispatch_token = '', losses = losses + 1, call_ended_at = {{now}},
  call_ended_by = 'lost' WHERE id = %(task)s AND {LOSE}"""
LOSE_TO_END = f"""
UPDATE {TASK} SET state = %(state)s, slot = NULL, dispatch_token = '', losses = losses + 1, settled_at = {{now}},
  error_code = %(code)s, call_ended_at = {{now}}, call_ended_by = 'lost' WHERE id = %(task)s AND {LOSE}"""
