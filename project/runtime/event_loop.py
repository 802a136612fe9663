"""The asyncio loop of this process: every provider call runs on it, in one background thread.

Synchronous code passes coroutines to it with `submit` or `run`. The loop is made lazily and keyed by process id, because
a loop made before a fork does not run in the child. ORM calls must not run on it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def loop() -> asyncio.AbstractEventLoop:
    """This process's running loop."""
    with _lock:
        found = _loops.get(os.getpid())
        if found is None or found.is_closed():
            found = _loops[os.getpid()] = _start()
        return found


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Starts the coroutine on the loop; the future's `cancel()` cancels the coroutine."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine on the loop and waits for its result; an interrupted wait cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    finally:
        # Cancels nothing once the coroutine has returned.
        future.cancel()


_kept_tasks: set[asyncio.Task[Any]] = set()


def kept_task(coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """Starts a task that lives until it is done: the loop's own references to its tasks are weak."""
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    _kept_tasks.add(task)
    task.add_done_callback(_kept_tasks.discard)
    return task


class PerLoop(Generic[T]):
    """A callable that returns one object per event loop, made at the first call and dropped with the loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def __call__(self) -> T:
        running = asyncio.get_running_loop()
        if running not in self._made:
            self._made[running] = self._make()
        return self._made[running]


def _start() -> asyncio.AbstractEventLoop:
    new = asyncio.new_event_loop()
    ready = threading.Event()

    def main() -> None:
        asyncio.set_event_loop(new)
        new.call_soon(ready.set)
        new.run_forever()

    threading.Thread(target=main, name="sluicegate-loop", daemon=True).start()
    ready.wait()
    return new
