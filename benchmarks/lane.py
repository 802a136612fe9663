"""How busy the lane keeps a model server that takes 50 ms a batch: the server's busy time over the whole span.

Two repositories, at least 200 batches of 32. All rows are scanned, and the first tasks queued, before the provider is
resumed, so that the span from the first call's arrival to the last call's end contains only the lane's work. The times
are taken from the server's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai

from benchmarks import workload
from benchmarks.row import Row
from benchmarks.sandbox import ScriptedServer, scripted_server, worker
from embeddings import registry
from embeddings.models import KnowledgeRow, RepositoryOutcome, TenantRun
from embeddings.runs import sweep
from embeddings.runs.follow import follow
from embeddings.states import OutcomeStatus, RunTrigger
from project.local.processes import within

LATENCY_S = 0.05
TARGET = 0.93
_BYTES_EACH = 2_750_000
_BATCHES_LEAST = 200
_LONGEST_S = 60.0
_REPEATS = 2


def run(database: str) -> list[Row]:
    sources = [workload.git_repository(f"part-{n}", files) for n, files in enumerate(workload.parts(2, _BYTES_EACH))]
    with scripted_server("--latency", str(LATENCY_S), "--dimensions", "384") as server:
        alone = [_round(server, sources, _scan_here, follow)]
        with worker():
            by_worker = [_round(server, sources, _nothing, workload.await_end) for _ in range(_REPEATS)]
        bare = _bare_loop(server)
    what = f"busy share of a 50 ms server, {database}"
    return [
        Row("lane", f"{what}, a Celery worker", tuple(by_worker), target=TARGET, decimals=3),
        Row("lane", f"{what}, the follower without any worker", tuple(alone), decimals=3),
        Row("lane", "the same, the SDK alone in a loop: no database, no queue, raw replies", (bare,), decimals=3),
    ]


def _round(
    server: ScriptedServer,
    sources: Sequence[Path],
    scan: Callable[[Sequence[TenantRun]], None],
    work: Callable[[Sequence[TenantRun]], object],
) -> float:
    """One sweep of new tenants at a new provider; returns the share of the span in which the server was busy."""
    provider = workload.provider(server, is_paused=True)
    repositories = [workload.repository(workload.tenant(provider), source) for source in sources]
    runs = sweep.start(repositories, trigger=RunTrigger.COMMAND)
    scan(runs)
    assert within(lambda: _all_embedding(runs), _LONGEST_S), "the scan did not end"
    server.clear()
    registry.resume_provider(provider)
    work(runs)
    log = server.log()
    assert log["embedding_calls"] >= _BATCHES_LEAST, log
    assert log["peak_in_flight"] == 1, log
    return _busy_share(log)


def _busy_share(log: dict[str, Any]) -> float:
    share: float = log["busy_seconds"] / (log["last_ended_at"] - log["first_arrived_at"])
    print(f"lane: {log['embedding_calls']} batches, busy {share:.3f}", flush=True)
    return share


def _bare_loop(server: ScriptedServer) -> float:
    """What the SDK alone can do: the next request follows the last reply, which nobody decodes or stores."""
    texts = list(KnowledgeRow.objects.order_by("pk").values_list("text", flat=True)[: 32 * _BATCHES_LEAST])
    server.clear()
    asyncio.run(_embed_all(server.base_url, texts))
    return _busy_share(server.log())


async def _embed_all(base_url: str, texts: Sequence[str]) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for start in range(0, len(texts), 32):
            some = list(texts[start : start + 32])
            await client.embeddings.with_raw_response.create(model="embed", input=some, encoding_format="base64")


def _scan_here(runs: Sequence[TenantRun]) -> None:
    for run_ in runs:
        while sweep.scan_next(run_.pk):
            pass


def _nothing(runs: Sequence[TenantRun]) -> None:
    """Nothing, because the worker scans."""


def _all_embedding(runs: Sequence[TenantRun]) -> bool:
    outcomes = RepositoryOutcome.objects.filter(run__in=runs)
    return not outcomes.exclude(status=OutcomeStatus.EMBEDDING).exists()
