"""Who decides what a call gets: rules, a plan, a queue, in this order."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .exchange import Reply
from .log import Call

Plan = Callable[[Call], Reply | None]
Predicate = Callable[[Call], bool]


class Script:
    """A call gets the first of: what `when` says, what the `script` plan says, the front of the `next` queue (embedding
    and chat calls only), and else the default of its dialect."""

    def __init__(self) -> None:
        self._script_lock = threading.Lock()
        self._plan: Plan = lambda call: None
        self._rules: list[_Rule] = []
        self._queue: deque[Reply] = deque()

    def script(self, plan: Plan) -> None:
        """Let `plan(call)` decide; None leaves the call to the queue and the default."""
        self._plan = plan

    def next(self, *replies: Reply) -> None:
        """Queue replies, one for each coming embedding or chat call."""
        with self._script_lock:
            self._queue.extend(replies)

    def when(self, predicate: Predicate, reply: Reply, times: int | None = None) -> None:
        """Answer the calls for which `predicate` holds with `reply`, `times` of them or all. Earlier rules win."""
        with self._script_lock:
            self._rules.append(_Rule(predicate, reply, times))

    def clear_script(self) -> None:
        """Forget the plan, every rule and the queue."""
        with self._script_lock:
            self._plan = lambda call: None
            self._rules.clear()
            self._queue.clear()

    def decide(self, call: Call) -> Reply | None:
        """The scripted reply to `call`, or None for the default."""
        with self._script_lock:
            for rule in self._rules:
                if rule.times != 0 and rule.applies(call):
                    rule.times = None if rule.times is None else rule.times - 1
                    return rule.reply
        if planned := self._plan(call):
            return planned
        with self._script_lock:
            return self._queue.popleft() if self._queue and call.kind != "other" else None


@dataclass
class _Rule:
    applies: Predicate
    reply: Reply
    times: int | None
