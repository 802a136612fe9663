"""The raw statements of the task queue, and how they are run.

Composing such a query through the ORM costs fifteen times as much as running it, and these run for each batch. The text is
the same on SQLite and PostgreSQL except for the clock and the lock. Times are the database's own, so that several machines
agree on leases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connection

from embeddings.runtime.clock import postgresql_lease_expiry
from embeddings.states import OUTCOME_UNFINISHED, TaskPriority, TaskState

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper


def execute(cursor: CursorWrapper, statement: str, *, ahead_ms: int = 0, **values: Any) -> int:
    """Runs a statement with the clock and the lock of this database filled in. Returns the number of affected rows."""
    waits = (ahead_ms, settings.LEASE_MS, -settings.LANE_BATCH_MAX_WAIT_MS)
    cursor.execute(_filled(statement, connection.vendor, *waits), values)
    return int(cursor.rowcount)


@lru_cache(maxsize=256)
def _filled(statement: str, vendor: str, ahead_ms: int, lease_ms: int, overtaken_ms: int) -> str:
    return statement.format(
        now=now(),
        ahead=now(ahead_ms),
        expiry=postgresql_lease_expiry() if vendor == "postgresql" else now(),
        lease=now(lease_ms),
        overtaken=now(overtaken_ms),
        lock=lock(),
        # SQLite's clock counts milliseconds, and dispatches may be closer. It has one machine, so that Python's clock will do.
        instant="clock_timestamp()" if vendor == "postgresql" else "%(instant)s",
        # A crash of the database may lose an admission or a settlement: at worst a batch is bought twice.
        relax=", set_config('synchronous_commit', 'off', true)" if vendor == "postgresql" else "",
    )


def now(plus_ms: int = 0) -> str:
    """The database's clock as an expression, `plus_ms` from now."""
    if connection.vendor == "postgresql":
        return f"(clock_timestamp() + interval '{int(plus_ms)} milliseconds')"
    return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', '{int(plus_ms) / 1000:+.3f} seconds')"


def lock() -> str:
    """The end of a SELECT that locks its rows until the transaction ends; a transaction of SQLite locks the database."""
    # A plain FOR UPDATE would queue behind every put: inserting a task takes a share lock on its provider and its run.
    return "FOR NO KEY UPDATE" if connection.vendor == "postgresql" else ""


TASK = "embeddings_embeddingtask"
QUEUED, DISPATCHED, ANSWERED, STORED, FAILED, REMOVED = (int(state) for state in TaskState)
INTERACTIVE, BATCH = (int(priority) for priority in TaskPriority)
AT_WORK = f"({DISPATCHED}, {ANSWERED})"
UNDECIDED = "(" + ", ".join(f"'{status.value}'" for status in OUTCOME_UNFINISHED) + ")"
HELD = f"WHERE id = %(task)s AND dispatch_token = %(token)s AND state IN {AT_WORK}"

READ_STATE = """
SELECT is_paused, busy_until IS NOT NULL AND busy_until > {now}, overtaken_since IS NOT NULL AND overtaken_since <= {overtaken},
  overtaken_since IS NOT NULL, max_in_flight"""
LOCK_PROVIDER = f"{READ_STATE} FROM embeddings_provider WHERE id = %(provider)s {{lock}}"
LOCK_TO_ADMIT = f"{READ_STATE} {{relax}} FROM embeddings_provider WHERE id = %(provider)s {{lock}}"
# The longest busy time wins: a later reply that asks for less does not shorten it.
PROVIDER_BUSY = """
UPDATE embeddings_provider SET busy_until = {ahead}
WHERE id = %(provider)s AND (busy_until IS NULL OR busy_until < {ahead})"""
TAKEN_SLOTS = f"SELECT slot FROM {TASK} WHERE provider_id = %(provider)s AND slot IS NOT NULL"
PICK_ANY = f"""
SELECT t.id, t.generation_id, t.priority, t.run_id, t.outcome_id, t.split_from_id FROM {TASK} t
JOIN embeddings_embeddinggeneration g ON g.id = t.generation_id
JOIN embeddings_provider p ON p.id = t.provider_id
LEFT JOIN embeddings_tenantrun r ON r.id = t.run_id
LEFT JOIN embeddings_repositoryoutcome o ON o.id = t.outcome_id
WHERE t.provider_id = %(provider)s AND t.settled_at IS NULL AND t.state = {QUEUED} AND t.priority <= %(priority_most)s
  AND (t.expires_at IS NULL OR t.expires_at > {{now}})
  AND (t.run_id IS NULL OR (r.dispatch_allowed AND o.status IN {UNDECIDED} AND g.model = p.embedding_model))
ORDER BY """
# From the tenant's outcomes, also those that have ended: one that sweeps many small repositories has one turn all the same.
TENANT_LAST_DISPATCHED = """
(SELECT MAX(f.last_dispatched_at) FROM embeddings_repositoryoutcome f WHERE f.tenant_slug = o.tenant_slug)"""
BY_ORDER = {
    "fair": f"{TENANT_LAST_DISPATCHED} ASC NULLS FIRST, o.last_dispatched_at ASC NULLS FIRST, t.id",
    "fifo": "t.id",
}
PICK = {
    (order, batch_first): f"{PICK_ANY} t.priority {'DESC' if batch_first else 'ASC'}, {by} LIMIT 1"
    for order, by in BY_ORDER.items()
    for batch_first in (False, True)
}
DISPATCH = f"""
UPDATE {TASK} SET state = {DISPATCHED}, slot = %(slot)s, dispatch_token = %(token)s, lease_expires_at = {{lease}},
  dispatched_at = {{now}}, attempts = attempts + 1, call_ended_at = NULL, call_ended_by = ''
WHERE id = %(task)s AND state = {QUEUED}"""
COUNT_DISPATCH = f"""
UPDATE embeddings_repositoryoutcome SET last_dispatched_at = {{instant}}, provider_calls = provider_calls + 1
WHERE id = %(outcome)s AND status IN {UNDECIDED}"""
OVERTAKING = f"""
UPDATE embeddings_provider SET overtaken_since = CASE
  WHEN EXISTS (SELECT 1 FROM {TASK} t WHERE t.provider_id = %(provider)s
    AND t.settled_at IS NULL AND t.state = {QUEUED} AND t.priority = {BATCH})
  THEN COALESCE(overtaken_since, {{now}}) END WHERE id = %(provider)s"""
NOT_OVERTAKEN = """
UPDATE embeddings_provider SET overtaken_since = NULL WHERE id = %(provider)s AND overtaken_since IS NOT NULL"""
# A condition for each partial index: a single one over all tasks of a provider would read its whole history.
HAS_LOST = f"""(EXISTS (SELECT 1 FROM {TASK} l WHERE l.provider_id = %(provider)s AND l.settled_at IS NULL
    AND l.state IN {AT_WORK}
    AND l.lease_expires_at < {{expiry}})
  OR EXISTS (SELECT 1 FROM {TASK} l WHERE l.provider_id = %(provider)s AND l.slot IS NOT NULL
    AND l.lease_expires_at < {{expiry}}))"""
HAS_WORK = f"""
SELECT 1 WHERE {HAS_LOST} OR EXISTS (SELECT 1 FROM {TASK} q WHERE q.provider_id = %(provider)s AND q.settled_at IS NULL
    AND q.state = {QUEUED})"""
WANTS_DRAIN = f"""
SELECT 1 FROM embeddings_provider p WHERE p.id = %(provider)s AND ({HAS_LOST}
  OR (NOT p.is_paused AND EXISTS (SELECT 1 FROM {TASK} q WHERE q.provider_id = %(provider)s AND q.settled_at IS NULL
    AND q.state = {QUEUED}
      AND (q.priority = {INTERACTIVE} OR p.busy_until IS NULL OR p.busy_until <= {{now}}))
    AND (p.max_in_flight < 1
      OR (SELECT COUNT(*) FROM {TASK} s WHERE s.provider_id = %(provider)s AND s.slot IS NOT NULL) < p.max_in_flight)))"""
SETTLE = f"""
UPDATE {TASK} SET state = {ANSWERED}, slot = NULL, lease_expires_at = {{lease}}, call_ended_at = {{now}},
  call_ended_by = 'reply' {HELD}"""
RENEW = f"""
UPDATE {TASK} SET lease_expires_at = {{lease}}
WHERE id = %(task)s AND dispatch_token = %(token)s AND (state IN {AT_WORK} OR slot IS NOT NULL)"""
END = f"""
UPDATE {TASK} SET state = %(state)s, slot = NULL, settled_at = {{now}}, error_code = %(code)s, error_detail = %(detail)s,
  call_ended_at = COALESCE(call_ended_at, {{now}}),
  call_ended_by = CASE call_ended_by WHEN '' THEN %(ended_by)s ELSE call_ended_by END {HELD}"""
FAIL_QUEUED = f"""
UPDATE {TASK} SET state = {FAILED}, settled_at = {{now}}, error_code = %(code)s, error_detail = %(detail)s
WHERE id = %(task)s AND state = {QUEUED}"""
RELEASE_SLOT = f"""
UPDATE {TASK} SET slot = NULL, call_ended_at = {{now}}, call_ended_by = 'late'
WHERE id = %(task)s AND dispatch_token = %(token)s AND state = {REMOVED} AND slot IS NOT NULL"""
MARK_STORED = f"""
UPDATE {TASK} SET state = {STORED}, settled_at = {{now}}
WHERE id = %(task)s AND dispatch_token = %(token)s AND state = {ANSWERED}"""
REQUEUE_BUSY = f"""
UPDATE {TASK} SET state = {QUEUED}, slot = NULL, dispatch_token = '', busy_requeues = busy_requeues + 1,
  busy_since = COALESCE(busy_since, {{now}}), call_ended_at = {{now}}, call_ended_by = 'busy' {HELD}"""
GIVE_BACK = f"""
UPDATE {TASK} SET state = {QUEUED}, slot = NULL, dispatch_token = '', attempts = attempts - 1, call_ended_at = {{now}},
  call_ended_by = 'shutdown' {HELD}"""
EXPIRE = f"""
UPDATE {TASK} SET state = {REMOVED}, error_code = %(reason)s, settled_at = {{now}}
WHERE provider_id = %(provider)s AND settled_at IS NULL AND state = {QUEUED} AND expires_at IS NOT NULL
  AND expires_at <= {{now}}"""
FREE_ABANDONED_SLOTS = f"""
UPDATE {TASK} SET slot = NULL, call_ended_at = {{now}}, call_ended_by = 'lost'
WHERE provider_id = %(provider)s AND slot IS NOT NULL AND state > {ANSWERED} AND lease_expires_at < {{expiry}}"""
LOST = f"""
SELECT id, run_id, outcome_id, losses FROM {TASK}
WHERE provider_id = %(provider)s AND settled_at IS NULL AND state IN {AT_WORK} AND lease_expires_at < {{expiry}}"""
LOSE = f"state IN {AT_WORK} AND lease_expires_at < {{expiry}}"
LOSE_TO_QUEUE = f"""
UPDATE {TASK} SET state = {QUEUED}, slot = NULL, dispatch_token = '', losses = losses + 1, call_ended_at = {{now}},
  call_ended_by = 'lost' WHERE id = %(task)s AND {LOSE}"""
LOSE_TO_END = f"""
UPDATE {TASK} SET state = %(state)s, slot = NULL, dispatch_token = '', losses = losses + 1, settled_at = {{now}},
  error_code = %(code)s, call_ended_at = {{now}}, call_ended_by = 'lost' WHERE id = %(task)s AND {LOSE}"""
