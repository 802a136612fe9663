"""The embedding of a search beside a sweep on the same lane, and a sweep beside endless searches.

Waiting times are read from the tasks' rows. `LANE_BATCH_MAX_WAIT_MS` is 1 s here, to keep the benchmark short.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import pairwise

from django.conf import settings
from django.db import connection

from benchmarks import workload
from benchmarks.row import Row
from benchmarks.sandbox import scripted_server, worker
from embeddings.models import EmbeddingTask, Provider, Repository, TenantRun
from embeddings.query import interactive
from embeddings.runs import sweep
from embeddings.states import RunTrigger, TaskPriority, TaskState
from project.local.model_files import models_dir
from project.local.model_server import ModelServer
from project.local.processes import CHECKOUT, within

BATCHES_TARGET = 2
_BYTES = 1_600_000
_CALLERS = 4
_FLOOD_S = 6.0
# Times that differ by less count as equal: processes and the database read the clock independently.
_SAME = timedelta(milliseconds=3)


def run(database: str) -> list[Row]:
    return [*_beside_scripted(), *_beside_local_model()]


def _beside_scripted() -> list[Row]:
    (files,) = workload.parts(1, _BYTES)
    source = workload.git_repository("sweep", files)
    with scripted_server("--latency", "0.05", "--dimensions", "384") as server, worker():
        provider = workload.provider(server)
        alone = _latencies(provider, 20, pause_s=0.02)
        with _sweeping(workload.repository(workload.tenant(provider), source)):
            beside = _latencies(provider, 40, pause_s=0.035)
        flooded = workload.provider(server)
        with _sweeping(workload.repository(workload.tenant(flooded), source)):
            gaps = _gaps_under_flood(flooded)
    longest_s = settings.LANE_BATCH_MAX_WAIT_MS / 1000
    return [
        Row("interactive", "embedding one query, 50 ms server, idle lane", alone, "ms", decimals=0),
        Row("interactive", "the same beside a sweep", beside, "ms", decimals=0),
        _waited_row("the same: batches that one of them waited for, at most", provider),
        Row(
            "interactive",
            f"endless searches by {_CALLERS} callers: a batch waits at most {longest_s:.0f} s and the calls of its turn",
            (max(gaps),),
            "s",
            longest_s + 0.25,
            "at most",
        ),
        Row("interactive", "the same: batches dispatched meanwhile", (len(gaps) + 1,), target=4, decimals=0),
    ]


def _beside_local_model() -> list[Row]:
    """The real MiniLM on this machine's cores."""
    (files,) = workload.parts(1, 500_000)
    source = workload.git_repository("local", files)
    with ModelServer(models_dir(CHECKOUT / "var")) as server, worker():
        provider = workload.provider_at(
            server.base_url, embedding_model=server.embedding_model, query_timeout_ms=60_000
        )
        alone = _latencies(provider, 5, pause_s=0.05)
        with _sweeping(workload.repository(workload.tenant(provider), source)):
            beside = _latencies(provider, 6, pause_s=0.3)
    return [
        Row("interactive", "embedding one query, local MiniLM, idle lane", alone, "ms", decimals=0),
        Row("interactive", "the same beside a sweep, batches of 32", beside, "ms", decimals=0),
        _waited_row("the same: batches that one of them waited for, at most", provider),
    ]


@contextmanager
def _sweeping(repository: Repository) -> Iterator[TenantRun]:
    """A sweep that is embedding during the whole block; it is cancelled at the end."""
    (started,) = sweep.start([repository], trigger=RunTrigger.COMMAND)
    stored = EmbeddingTask.objects.filter(run=started, state=TaskState.STORED)
    assert within(lambda: stored.count() >= 2, 60.0), "the sweep did not come to embed"
    try:
        yield started
        started.refresh_from_db()
        assert started.finished_at is None, "the sweep ended before the measurement"
    finally:
        sweep.request_cancel(started)


def _latencies(provider: Provider, count: int, pause_s: float) -> tuple[float, ...]:
    """Milliseconds of `count` queries, one after another, at random moments of the batch that is in flight."""
    moments = random.Random(7)
    interactive.embed_texts(provider, ["the first call creates the client"])
    found = []
    for number in range(count):
        time.sleep(pause_s * (0.2 + 1.6 * moments.random()))
        began = time.perf_counter()
        interactive.embed_texts(provider, [f"query {number}"])
        found.append((time.perf_counter() - began) * 1000)
    return tuple(found)


def _waited_row(what: str, provider: Provider) -> Row:
    queries = EmbeddingTask.objects.filter(provider=provider, priority=TaskPriority.INTERACTIVE)
    most = max(_batches_waited_for(query) for query in queries)
    return Row("interactive", what, (most,), target=BATCHES_TARGET, better="at most", decimals=0)


def _batches_waited_for(query: EmbeddingTask) -> int:
    """The number of batches at the provider while the query was queued."""
    assert query.dispatched_at is not None
    return EmbeddingTask.objects.filter(
        provider=query.provider_id,
        priority=TaskPriority.BATCH,
        dispatched_at__lt=query.dispatched_at - _SAME,
        call_ended_at__gt=query.queued_at + _SAME,
    ).count()


def _gaps_under_flood(provider: Provider) -> list[float]:
    """Seconds between the dispatches of batches while callers ask one query after another, without a pause."""
    over = threading.Event()
    callers = [threading.Thread(target=_ask_until, args=(provider, over)) for _ in range(_CALLERS)]
    began = len(_dispatches(provider))
    for caller in callers:
        caller.start()
    over.wait(_FLOOD_S)
    during = _dispatches(provider)[began:]
    over.set()
    for caller in callers:
        caller.join()
    return [(later - earlier).total_seconds() for earlier, later in pairwise(during)]


def _ask_until(provider: Provider, over: threading.Event) -> None:
    number = 0
    while not over.is_set():
        number += 1
        interactive.embed_texts(provider, [f"query {threading.get_ident()} {number}"])
    connection.close()


def _dispatches(provider: Provider) -> list[datetime]:
    batches = EmbeddingTask.objects.filter(provider=provider, priority=TaskPriority.BATCH)
    moments = batches.order_by("dispatched_at").values_list("dispatched_at", flat=True)
    return [moment for moment in moments if moment is not None]
