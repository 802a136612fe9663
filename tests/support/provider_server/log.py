"""What the server was asked, when, and how each call ended: the judge of who called the provider."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

EndedBy = Literal["replied", "client_closed", "server_closed"]
Kind = Literal["embedding", "chat", "other"]


@dataclass(frozen=True)
class Call:
    """One request, read whole. Times are `time.monotonic()` seconds, comparable across processes.

    `headers` have lower-case names, `path` is without its query, `texts` are the embedding inputs or the contents of
    the chat messages. `ended_at` and `ended_by` are None while the call is open.
    """

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    texts: tuple[str, ...]
    arrived_at: float
    ended_at: float | None = None
    ended_by: EndedBy | None = None
    kind: Kind = "other"
    query: str = ""

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


class CallLog:
    """Every call in order of arrival. A call is here before its answer starts and has ended before its last byte left,
    so that `peak_in_flight` is never inflated by a client that is quicker than this log."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._count = 0
        self._open_embeddings: dict[int, Callable[[], bool]] = {}
        self._peak_in_flight = 0
        self._texts_seen: Counter[str] = Counter()

    def begin(self, client_has_closed: Callable[[], bool], **fields: Any) -> Call:
        """Log a call. Clients that have closed meanwhile are noticed first: a new call must not overlap a dead one."""
        with self._changed:
            self._end_closed()
            self._count += 1
            call = Call(number=self._count, arrived_at=time.monotonic(), **fields)
            self._calls[call.number] = call
            if call.kind == "embedding":
                self._texts_seen.update(call.texts)
                self._open_embeddings[call.number] = client_has_closed
                self._peak_in_flight = max(self._peak_in_flight, len(self._open_embeddings))
            self._changed.notify_all()
            return call

    def end(self, number: int, ended_by: EndedBy) -> None:
        """End a call. The first end stands, except that a reply that could not be delivered was none."""
        with self._changed:
            self._end(number, ended_by)

    def clear(self) -> None:
        """Forget the ended calls, their texts and the peak; numbers go on. For benchmarks that measure in rounds."""
        with self._changed:
            self._calls = {number: call for number, call in self._calls.items() if call.is_open}
            self._peak_in_flight = len(self._open_embeddings)
            self._texts_seen.clear()

    def calls(self, kind: Kind | None = None) -> list[Call]:
        with self._changed:
            return [call for call in self._calls.values() if kind in (None, call.kind)]

    @property
    def in_flight(self) -> int:
        with self._changed:
            self._end_closed()
            return len(self._open_embeddings)

    @property
    def peak_in_flight(self) -> int:
        return self._peak_in_flight

    @property
    def texts_seen(self) -> Counter[str]:
        with self._changed:
            return self._texts_seen.copy()

    def wait_for(self, condition: Callable[[list[Call]], bool], timeout: float) -> list[Call]:
        """The calls, once `condition` holds for them; AssertionError with what there was after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(list(self._calls.values())), timeout):
                seen = [f"{call.number} {call.method} {call.path} {call.ended_by}" for call in self._calls.values()]
                raise AssertionError(f"the awaited calls did not come within {timeout} s; seen: {seen}")
            return list(self._calls.values())

    def summary(self) -> dict[str, Any]:
        """The counters as JSON-ready values, seconds for times; `busy_seconds` is the time with an embedding open."""
        embeddings = self.calls("embedding")
        ended = [call.ended_at for call in embeddings if call.ended_at is not None]
        return {
            "calls": len(self._calls),
            "embedding_calls": len(embeddings),
            "chat_calls": len(self.calls("chat")),
            "in_flight": self.in_flight,
            "peak_in_flight": self.peak_in_flight,
            "texts": sum(self.texts_seen.values()),
            "distinct_texts": len(self.texts_seen),
            "ended_by": Counter(str(call.ended_by) for call in self.calls()),
            "first_arrived_at": embeddings[0].arrived_at if embeddings else None,
            "last_ended_at": max(ended, default=None),
            "busy_seconds": _covered(embeddings),
        }

    def _end(self, number: int, ended_by: EndedBy) -> None:
        call = self._calls.get(number)
        if call and (call.ended_by is None or (call.ended_by == "replied" and ended_by != "replied")):
            self._calls[number] = replace(call, ended_at=time.monotonic(), ended_by=ended_by)
            self._open_embeddings.pop(number, None)
            self._changed.notify_all()

    def _end_closed(self) -> None:
        for number in [number for number, has_closed in self._open_embeddings.items() if has_closed()]:
            self._end(number, "client_closed")


def _covered(calls: list[Call]) -> float:
    """The length of the union of the calls' intervals, in seconds."""
    total, reached = 0.0, 0.0
    for call in sorted(calls, key=lambda call: call.arrived_at):
        end = call.ended_at if call.ended_at is not None else time.monotonic()
        total += max(0.0, end - max(call.arrived_at, reached))
        reached = max(reached, end)
    return total
