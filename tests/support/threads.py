"""Running parts of a test in threads, without losing what they raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import connection

T = TypeVar("T")


@contextmanager
def in_threads() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    """Runs functions in threads with database connections of their own; leaving waits for them and raises what they did."""
    started: list[Future[Any]] = []

    def with_own_connection(work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            connection.close()

    with ThreadPoolExecutor(max_workers=8) as pool:

        def submit(work: Callable[[], T]) -> Future[T]:
            future = pool.submit(with_own_connection, work)
            started.append(future)
            return future

        yield submit
    for future in started:
        future.result()


def in_thread(call: Any, *arguments: Any) -> Any:
    """Starts the call in a daemon thread. Returns `result()`, which joins it and returns or raises what the call did."""
    box: dict[str, Any] = {}

    def guarded() -> None:
        try:
            box["value"] = call(*arguments)
        except Exception as error:  # It is raised where the result is asked for.
            box["error"] = error

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()

    def result(timeout: float = 20.0) -> Any:
        thread.join(timeout)
        assert not thread.is_alive(), "the call has not ended"
        if "error" in box:
            raise box["error"]
        return box["value"]

    return result


def raised_by(call: Callable[[], object]) -> type[BaseException] | None:
    """The class of the exception that the call raises; None if it returns."""
    try:
        call()
    except Exception as error:  # The test looks at the class of whatever is raised.
        return type(error)
    return None
