"""How many calls a silent model server still gets after the first final timeout.

Sluicegate, with 50 repositories queued, is compared with sequential indexing loops over 4 repositories that use
LangChain's and LlamaIndex's embedding classes with their default retries. The calls are counted by each server's log.
The loops get a short client timeout and are stopped after a while, because they would otherwise go on.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import workload
from benchmarks.row import Row
from benchmarks.sandbox import scripted_server, var_dir, worker
from benchmarks.virtualenvs import bin_of
from embeddings import codes, registry
from embeddings.models import RepositoryOutcome
from embeddings.runs import sweep
from embeddings.states import OutcomeStatus, RunTrigger
from project.local.processes import CHECKOUT, background, within

REPOSITORIES = 50
_LOOP_REPOSITORIES = 4
_LOOP_TIMEOUT_S = 0.25
_LOOP_LONGEST_S = 40.0
_LOOPS = {
    "langchain": ("LangChain", ("langchain-openai==1.7.4", "langchain-core==1.8.3", "openai==3.57.0")),
    "llamaindex": (
        "LlamaIndex",
        ("llama-index-embeddings-openai==0.7.0", "llama-index-core==0.14.25", "openai==3.57.0"),
    ),
}


def run(database: str) -> list[Row]:
    calls = _sweep_of_a_silent_server()
    rows = [
        Row(
            "circuit",
            f"provider calls after the first final timeout, {REPOSITORIES} repositories queued",
            (calls - 1,),
            target=0,
            better="exactly",
            decimals=0,
        )
    ]
    pythons = {library: bin_of(library, pins) / "python" for library, (_, pins) in _LOOPS.items()}
    with ThreadPoolExecutor() as pool:
        loops = {library: pool.submit(_loop, python, library) for library, python in pythons.items()}
    for library, (name, pins) in _LOOPS.items():
        calls, story = loops[library].result()
        what = f"calls of {name}'s loop over {_LOOP_REPOSITORIES} repositories ({pins[0]}), {story}"
        rows.append(Row("circuit", what, (calls,), decimals=0))
    return rows


def _sweep_of_a_silent_server() -> int:
    """The number of calls in a worker's run over repositories that were all queued before the first call."""
    source = workload.git_repository("small", {f"part{n}.txt": f"words of part {n}\n".encode() for n in range(64)})
    with scripted_server("--hang") as server, worker():
        provider = workload.provider(server, is_paused=True, embedding_timeout_ms=1_000)
        tenants = [workload.tenant(provider) for _ in range(REPOSITORIES)]
        repositories = [workload.repository(tenant, source) for tenant in tenants]
        (started,) = sweep.start(repositories, trigger=RunTrigger.COMMAND, concurrency=REPOSITORIES)
        outcomes = RepositoryOutcome.objects.filter(run=started)
        queued = outcomes.filter(status=OutcomeStatus.EMBEDDING)
        assert within(lambda: queued.count() == REPOSITORIES, 60.0), "not all repositories came to be queued"
        registry.resume_provider(provider)
        workload.await_end([started])
        spared = outcomes.filter(error_code=codes.CIRCUIT_OPEN).count()
        assert spared == REPOSITORIES - 1, f"{spared} repositories were spared"
        return int(server.log()["embedding_calls"])


def _loop(python: Path, library: str) -> tuple[int, str]:
    """The number of calls that the loop made, and how far it had come when it ended or was stopped."""
    with scripted_server("--hang") as server:
        words = [library, server.base_url, str(_LOOP_REPOSITORIES), str(_LOOP_TIMEOUT_S)]
        script = CHECKOUT / "benchmarks" / "naive_loop.py"
        log = var_dir() / f"{library}.log"
        with background([str(python), str(script), *words], os.environ, log) as loop:
            assert within(lambda: b"started" in log.read_bytes(), 60.0), log.read_text()
            ended = within(lambda: loop.poll() is not None, _LOOP_LONGEST_S)
        given_up = log.read_text().count("repository ")
        story = "to its end" if ended else f"{given_up} of them given up when stopped after {_LOOP_LONGEST_S:.0f} s"
        return int(server.log()["embedding_calls"]), story
