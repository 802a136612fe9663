"""Real sweeps for tests: real git repositories, a scripted model server of any kind, and a driver without any worker."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from django.db import connection

from embeddings.dispatch import task_queue
from embeddings.models import EmbeddingTask, KnowledgeRow, Provider, Repository, RepositoryOutcome, Tenant, TenantRun
from embeddings.runs import sweep
from embeddings.states import RUN_UNFINISHED, ProviderKind, RunTrigger, TaskState
from tests.support.factories import make_provider, make_repository, make_tenant
from tests.support.git_repositories import GitRepository
from tests.support.provider_server import ProviderServer
from tests.support.waiting import eventually

T = TypeVar("T")

OPENAI, OLLAMA, GEMINI = ProviderKind.OPENAI_COMPATIBLE, ProviderKind.OLLAMA, ProviderKind.GEMINI
LOCAL_KINDS = (OPENAI, OLLAMA)
KINDS = (OPENAI, OLLAMA, GEMINI)
KEY = "SLUICEGATE_KEY_TESTS"
DIMENSIONS = 8
_END_WITHIN_S = 30.0


@dataclass
class Site:
    """A provider of one kind at a scripted server, one tenant, and its repositories under `directory`."""

    server: ProviderServer
    provider: Provider
    tenant: Tenant
    directory: Path
    sources: dict[int, GitRepository] = field(default_factory=dict)

    def repository(self, slug: str, files: Mapping[str, str | bytes], tenant: Tenant | None = None) -> Repository:
        """A repository with these files, committed."""
        owner = tenant or self.tenant
        source = GitRepository(self.directory / f"{owner.slug}-{slug}")
        source.commit(files)
        made = make_repository(owner, slug=slug, source=str(source.path))
        self.sources[made.pk] = source
        return made

    def source(self, repository: Repository) -> GitRepository:
        return self.sources[repository.pk]

    def configure(self, **values: Any) -> None:
        """Changes the provider as a command would."""
        self.provider.refresh_from_db()
        for name, value in values.items():
            setattr(self.provider, name, value)
        self.provider.save()


def make_site(kind: ProviderKind, server: ProviderServer, directory: Path, **provider: Any) -> Site:
    """Gemini needs a key: its variable is `KEY`."""
    urls = {OPENAI: server.openai_url, OLLAMA: server.address, GEMINI: server.gemini_url}
    defaults = {"kind": kind, "base_url": urls[kind], "api_key_env": KEY if kind == GEMINI else ""}
    made = make_provider(**defaults | provider)
    return Site(server, made, make_tenant(embedding_provider=made), directory)


def texts(name: str, count: int) -> dict[str, str]:
    """Files of one row each, whose texts hold `name` and their number."""
    return {f"{number:03}.txt": f"{name} text {number}\n" for number in range(count)}


def start(*repositories: Repository, concurrency: int = 2) -> TenantRun:
    """One run over the repositories, scanned as far as its concurrency allows and waiting for a drain."""
    (run,) = sweep.start(repositories, trigger=RunTrigger.COMMAND, concurrency=concurrency)
    while sweep.scan_next(run.pk):
        pass
    return run


def sweep_all(*repositories: Repository, concurrency: int = 2) -> TenantRun:
    """One run over the repositories, driven to its end."""
    return drive(start(*repositories, concurrency=concurrency))


def drain(site: Site) -> int:
    """Drains the site's provider in this thread."""
    return sweep.drain(site.provider.pk)


def drive(run: TenantRun) -> TenantRun:
    """Scans, drains and advances until the run is finished."""
    deadline = time.monotonic() + _END_WITHIN_S
    run_id = run.pk
    while time.monotonic() < deadline:
        while sweep.scan_next(run.pk):
            pass
        sweep.drain(run.provider_id)
        run = sweep.advance(run.pk)
        if run.status not in RUN_UNFINISHED:
            return run
        eventually(
            functools.partial(_has_something_to_do, run_id), message="something left to do in the run", interval=0.02
        )
    raise AssertionError(f"the run did not end within {_END_WITHIN_S} s")


def _has_something_to_do(run_id: int) -> bool:
    run = TenantRun.objects.get(pk=run_id)
    out = EmbeddingTask.objects.filter(run=run, state__in=(TaskState.DISPATCHED, TaskState.ANSWERED))
    return (
        run.status not in RUN_UNFINISHED
        or task_queue.wants_drain(run.provider_id)
        or sweep.is_claimable(run)
        or not (out.exists() or EmbeddingTask.objects.filter(run=run, state=TaskState.QUEUED).exists())
    )


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


def outcome_of(run: TenantRun, repository: Repository) -> RepositoryOutcome:
    return RepositoryOutcome.objects.get(run=run, repository=repository)


def stored(repository: Repository) -> int:
    """How many of the repository's rows have a vector."""
    return KnowledgeRow.objects.filter(repository=repository, vector__isnull=False).count()


def tasks_in(state: TaskState, run: TenantRun | None = None) -> int:
    tasks = EmbeddingTask.objects.filter(state=state)
    return (tasks.filter(run=run) if run else tasks).count()


def calls_with(server: ProviderServer, word: str) -> int:
    """How many embedding calls carried a text with this word."""
    return sum(any(word in text for text in call.texts) for call in server.embedding_calls)


def codes_of(run: TenantRun, repositories: Sequence[Repository]) -> list[tuple[str, str, str]]:
    found = (outcome_of(run, repository) for repository in repositories)
    return [(outcome.status, outcome.error_code, outcome.source_error_code) for outcome in found]


def slots_taken() -> int:
    return EmbeddingTask.objects.exclude(slot=None).count()


def raised_by(call: Callable[[], object]) -> type[BaseException] | None:
    """The class of what the call raises; None if it returns."""
    try:
        call()
    except Exception as error:
        return type(error)
    return None
