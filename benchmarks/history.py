"""The queue's hot pieces of work beside a history of 1,000 settled tasks, and of 1,000,000."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from django.db import connection

from benchmarks import workload
from benchmarks.row import Row
from embeddings.dispatch import task_queue
from embeddings.dispatch import task_statements as sql
from embeddings.dispatch.admission import policy_for
from embeddings.models import EmbeddingGeneration, EmbeddingTask, Provider
from embeddings.runs import retention
from embeddings.states import TaskState

SHORT, LONG = 1_000, 1_000_000
RATIO_TARGET = 2.0
_PURGED = 1_000
_PURGES = 5
_REPEATS = 200
_MADE = 1_000
_RECENT, _OLD, _BETWEEN = "2026-01-01T00:00Z", "2020-01-01T00:00Z", "2021-01-01T00:00Z"


def run(database: str) -> list[Row]:
    provider = workload.provider_at("http://127.0.0.1:9/v1")
    generation = EmbeddingGeneration.objects.create(provider=provider, model="embed")
    short = _times(provider, generation, SHORT)
    long = _times(provider, generation, LONG)
    rows = []
    for what in short:
        for settled, samples in ((SHORT, short[what]), (LONG, long[what])):
            row = f"{what} beside {settled:,} settled tasks, {database}"
            rows.append(Row("history", row, (1_000 * statistics.median(samples),), "ms"))
        ratio = statistics.median(long[what]) / statistics.median(short[what])
        rows.append(Row("history", f"{what}: the ratio, {database}", (ratio,), "", RATIO_TARGET, "at most"))
    return rows


def _times(provider: Provider, generation: EmbeddingGeneration, settled: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each piece of work, beside this many settled tasks."""
    policy = policy_for(provider)

    def admit_and_store() -> None:
        task = policy.admit(provider)
        assert task is not None
        task_queue.settle(task)
        task_queue.mark_stored(task)

    _settle(provider, generation, settled - EmbeddingTask.objects.count(), _RECENT)
    for _ in range(_REPEATS + 1):
        task_queue.put_interactive(provider, generation, ["a text"], 600_000)
    admitted = [_seconds(admit_and_store) for _ in range(_REPEATS)]
    listed = [_seconds(task_queue.providers_with_work) for _ in range(_REPEATS)]
    # The last one queued made the provider have work.
    admit_and_store()
    purged = []
    for _ in range(_PURGES):
        _settle(provider, generation, _PURGED, _OLD)
        purged.append(_seconds(lambda: retention.purge_tasks(_BETWEEN)))
    return {
        "an admission, its settlement and its end": admitted,
        "a round's list of providers with work": listed,
        f"a purge of {_PURGED:,} tasks": purged,
    }


def _settle(provider: Provider, generation: EmbeddingGeneration, number: int, at: str) -> None:
    """Inserts this many stored tasks that settled at this time: up to a thousand, and then copies of what there is."""
    facts = {"provider": provider, "generation": generation, "state": TaskState.STORED, "settled_at": at}
    made = min(max(number, 0), _MADE)
    EmbeddingTask.objects.bulk_create(EmbeddingTask(**facts) for _ in range(made))
    columns = ", ".join(str(field.column) for field in EmbeddingTask._meta.concrete_fields if not field.primary_key)
    copy = f"INSERT INTO {sql.TASK} ({columns}) SELECT {columns} FROM {sql.TASK} WHERE settled_at IS NOT NULL LIMIT %s"  # noqa: S608
    with connection.cursor() as cursor:
        while made < number:
            cursor.execute(copy, [number - made])
            made += cursor.rowcount


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
