"""A repository of 900 files and 5.7 MB: its first scan, without the provider, and a sweep that finds it unchanged."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from benchmarks import workload
from benchmarks.row import Row
from benchmarks.sandbox import ScriptedServer, scripted_server, worker
from embeddings.models import Repository, TenantRun
from embeddings.runs import sweep
from embeddings.runs.follow import follow
from embeddings.states import OutcomeStatus, RunTrigger
from project.local.processes import CHECKOUT

SCAN_TARGET_S = 3.0
UNCHANGED_TARGET_S = 0.5
_REPEATS = 3


def run(database: str) -> list[Row]:
    files = dict(workload.modules())
    size_mb = sum(map(len, files.values())) / 1e6
    source = workload.git_repository("django", files)
    with scripted_server("--dimensions", "384") as server:
        scans = [_first_scan(server, source) for _ in range(_REPEATS)]
        repository = _embedded(server, source)
        server.clear()
        verbs, (by_worker, with_worker), (by_follower, alone) = (
            [_verbs(repository) for _ in range(_REPEATS)],
            _unchanged(repository, worker),
            _unchanged(repository, nullcontext),
        )
        calls = server.log()["calls"]
    what = f"{len(files)} files, {size_mb:.1f} MB, {database}"
    seconds = partial(Row, unit="s", better="at most")
    return [
        seconds("scan", f"first scan: {what}, provider excluded", tuple(scans), target=SCAN_TARGET_S),
        seconds(
            "unchanged",
            f"sweep by a worker, from its start to its end: {what}",
            by_worker,
            target=UNCHANGED_TARGET_S,
        ),
        seconds("unchanged", "the same, no worker: the follower's own hands", by_follower, target=UNCHANGED_TARGET_S),
        seconds("unchanged", "the same, the verbs alone in one process", tuple(verbs)),
        seconds("unchanged", "the whole `manage.py sweep` beside a worker", with_worker),
        seconds("unchanged", "the whole `manage.py sweep` without a worker", alone),
        Row("unchanged", "provider calls in all of these", (calls,), target=0, better="exactly", decimals=0),
    ]


def _first_scan(server: ScriptedServer, source: Path) -> float:
    """Seconds from the claim of a new repository to its first queued batches: fetch, tree, blobs, chunks, rows."""
    repository = _repository(server, source, is_paused=True)
    (started,) = sweep.start([repository], trigger=RunTrigger.COMMAND)
    began = time.perf_counter()
    assert sweep.scan_next(started.pk)
    seconds = time.perf_counter() - began
    assert started.outcomes.get().status == OutcomeStatus.EMBEDDING
    sweep.request_cancel(started)
    return seconds


def _embedded(server: ScriptedServer, source: Path) -> Repository:
    repository = _repository(server, source)
    (ended,) = follow(sweep.start([repository], trigger=RunTrigger.COMMAND))
    assert ended.status == "completed", ended.status
    return repository


def _verbs(repository: Repository) -> float:
    began = time.perf_counter()
    (started,) = sweep.start([repository], trigger=RunTrigger.COMMAND)
    assert sweep.scan_next(started.pk)
    seconds = time.perf_counter() - began
    workload.await_end([started])
    return seconds


def _unchanged(
    repository: Repository, hands: Callable[[], AbstractContextManager[None]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of the runs, by their rows, and of the whole commands that started them."""
    runs, commands = [], []
    with hands():
        for _ in range(_REPEATS + 1):
            began = time.perf_counter()
            command = ["manage.py", "sweep", "--repository", str(repository), "--json"]
            subprocess.run([sys.executable, *command], cwd=CHECKOUT, check=True, capture_output=True)
            commands.append(time.perf_counter() - began)
            run_ = TenantRun.objects.latest("pk")
            assert run_.finished_at is not None
            assert run_.outcomes.get().status == OutcomeStatus.UNCHANGED
            runs.append((run_.finished_at - run_.created_at).total_seconds())
    # The first is left out: a worker's first task includes its imports.
    return tuple(runs[1:]), tuple(commands[1:])


def _repository(server: ScriptedServer, source: Path, **values: object) -> Repository:
    provider = workload.provider(server, **values)
    return workload.repository(workload.tenant(provider), source)
