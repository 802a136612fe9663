"""The entries of a turn's event log: types, keys and order (docs/architecture.md, Chat; decision 16).

A log is a stream in Valkey or Redis. Its ids are our own, `<seq>-0` with seq counting from 1: the server refuses an entry
that is appended twice, and a worker can append again what a restarted server has lost. The end has the highest seq: after it
the server refuses every late writer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

START, SOURCES, ATTEMPT, DELTA, FINISH, USAGE, END = "start", "sources", "attempt", "delta", "finish", "usage", "end"
# The reply's own fields (`system_fingerprint`, `citations`, ...) that no delta carried.
FIELDS = "fields"
# Made by readers, never logged: notices, the whole turn where its log is gone, and ticks.
NOTICE, SNAPSHOT, TICK = "notice", "snapshot", "tick"
FENCE = "fence"
# In the end event, for readers: how many entries the log must hold before it.
ENTRIES = "entries"

# Compact; escaped to ASCII: a server may send half of a surrogate pair in one delta and half in the next. One encoder
# for all: `json.dumps` would make one for each event.
to_json = json.JSONEncoder(separators=(",", ":")).encode

# Both are exact in a browser's numbers.
END_SEQ = 2**53 - 1
FENCE_SEQ = END_SEQ - 1


@dataclass(frozen=True)
class Event:
    """One entry. `seq` is 0 for an event that a reader made; `attempt` is 0 before the first call to the provider."""

    seq: int
    type: str
    attempt: int
    data: dict[str, Any]

    @property
    def is_end(self) -> bool:
        return self.type == END


def log_key(tenant_id: int, public_id: UUID) -> str:
    """The log's key, with the tenant's id: no tenant can name another's."""
    return f"sluicegate:turn:{tenant_id}:{public_id}"


def encode(kind: str, attempt: int, data: dict[str, Any]) -> bytes:
    return to_json({"type": kind, "attempt": attempt, **data}).encode()


def decode(entry_id: bytes, payload: bytes) -> Event:
    """The event of an entry: its id, and what `encode` made."""
    data = json.loads(payload)
    return Event(seq_of(entry_id), data.pop("type"), data.pop("attempt"), data)


def seq_of(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def storable(value: Any) -> Any:
    """The value with characters that no database stores (NUL, halves of surrogate pairs) replaced by U+FFFD."""
    if isinstance(value, str):
        whole = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return whole.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {storable(name): storable(content) for name, content in value.items()}
    return [storable(content) for content in value] if isinstance(value, list) else value
