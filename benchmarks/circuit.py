"""A model server that has gone silent: how many calls it still gets after the first final timeout.

Sluicegate with 50 repositories queued, beside the sequential indexing loops that LangChain's and LlamaIndex's own
embedding classes make, over 4 repositories with their default retries. Each server's own log counts. The loops get a
short client timeout and are stopped after a while, so that the benchmark ends: left alone, they would go on.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import material
from benchmarks.environments import bin_of
from benchmarks.row import Row
from benchmarks.runs import await_end
from benchmarks.stage import scripted_server, var_dir, worker
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
    """How many calls the server got in a run of a worker over repositories that were all queued when it began."""
    source = material.git_repository("small", {f"part{n}.txt": f"words of part {n}\n".encode() for n in range(64)})
    with scripted_server("--hang") as server, worker():
        provider = material.provider(server, is_paused=True, embedding_timeout_ms=1_000)
        tenants = [material.tenant(provider) for _ in range(REPOSITORIES)]
        repositories = [material.repository(tenant, source) for tenant in tenants]
        (started,) = sweep.start(repositories, trigger=RunTrigger.COMMAND, concurrency=REPOSITORIES)
        outcomes = RepositoryOutcome.objects.filter(run=started)
        queued = outcomes.filter(status=OutcomeStatus.EMBEDDING)
        assert within(lambda: queued.count() == REPOSITORIES, 60.0), "not all repositories came to be queued"
        registry.resume_provider(provider)
        await_end([started])
        spared = outcomes.filter(error_code=codes.CIRCUIT_OPEN).count()
        assert spared == REPOSITORIES - 1, f"{spared} repositories were spared"
        return int(server.log()["embedding_calls"])


def _loop(python: Path, library: str) -> tuple[int, str]:
    """The calls that the server got from the loop, and how far that had come when it ended or was stopped."""
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
