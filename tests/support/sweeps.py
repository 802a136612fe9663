"""Real sweeps for tests: git repositories, a scripted model server of any kind, and a run carried out in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from django.db import connection

from embeddings.dispatch import task_queue
from embeddings.dispatch.drain import Controls
from embeddings.dispatch.task_queue import Dispatched
from embeddings.models import EmbeddingTask, KnowledgeRow, Provider, Repository, RepositoryOutcome, Tenant, TenantRun
from embeddings.runs import sweep
from embeddings.states import RUN_UNFINISHED, ProviderKind, RunTrigger, TaskState
from embeddings.timeouts import OPENAI_COMPATIBLE_REQUEST_TIMEOUT
from tests.support.factories import make_provider, make_repository, make_tenant
from tests.support.git_repositories import GitRepository
from tests.support.provider_server import ProviderServer, vector_of
from tests.support.waiting import eventually

OPENAI, OLLAMA, GEMINI = ProviderKind.OPENAI_COMPATIBLE, ProviderKind.OLLAMA, ProviderKind.GEMINI
LOCAL_KINDS = (OPENAI, OLLAMA)
KINDS = (OPENAI, OLLAMA, GEMINI)
KEY = "SLUICEGATE_KEY_TESTS"
DIMENSIONS = 8


@dataclass
class Site:
    """A provider of one kind at a scripted server, a tenant, and its repositories, whose sources are in `folder`.

    `git` holds the sources of the tenant's repositories by slug.
    """

    server: ProviderServer
    folder: Path
    provider: Provider
    tenant: Tenant
    git: dict[str, GitRepository] = field(default_factory=dict)

    def repository(
        self,
        slug: str,
        *texts: str,
        files: Mapping[str, str | bytes] | None = None,
        tenant: Tenant | None = None,
        **values: Any,
    ) -> Repository:
        """A repository of one file, and so of one row, for each text; or of the given files."""
        owner = tenant or self.tenant
        source = GitRepository(self.folder / owner.slug / slug)
        source.commit(files_of(texts) if files is None else files)
        if owner == self.tenant:
            self.git[slug] = source
        return make_repository(owner, slug=slug, source=str(source.path), **values)

    def configure(self, **values: Any) -> None:
        """Changes the provider as a command would."""
        self.provider.refresh_from_db()
        for name, value in values.items():
            setattr(self.provider, name, value)
        self.provider.save()

    def paused(self, is_paused: bool) -> None:
        Provider.objects.filter(pk=self.provider.pk).update(is_paused=is_paused)

    def start(self, *repositories: Repository, concurrency: int = 2) -> TenantRun:
        """One run over the repositories, with nothing scanned yet."""
        again = Repository.objects.select_related("tenant__embedding_provider").in_bulk(
            [one.pk for one in repositories]
        )
        chosen = [again[one.pk] for one in repositories]
        (run,) = sweep.start(chosen, trigger=RunTrigger.COMMAND, concurrency=concurrency)
        return run

    def scan(self, run: TenantRun) -> None:
        """Scans what the run's concurrency allows; nothing is drained."""
        while sweep.scan_next(run.pk):
            pass

    def start_and_scan(self, *repositories: Repository, concurrency: int = 2) -> TenantRun:
        run = self.start(*repositories, concurrency=concurrency)
        self.scan(run)
        return run

    def drain(self) -> int:
        """Drains the provider in this thread."""
        return sweep.drain(self.provider.pk)

    def carry_out(self, run: TenantRun, controls: Controls = sweep.CONTROLS, timeout: float = 30.0) -> TenantRun:
        """Scans, drains and advances in this thread until the run has finished."""

        def finished() -> bool:
            self.scan(run)
            sweep.drain(run.provider_id, controls)
            return sweep.advance(run.pk).status not in RUN_UNFINISHED

        eventually(finished, timeout=timeout, message="the run finishes")
        run.refresh_from_db()
        return run

    def swept(self, *repositories: Repository, **options: Any) -> TenantRun:
        """A whole sweep."""
        return self.carry_out(self.start(*repositories, **options))


def make_site(kind: ProviderKind, server: ProviderServer, folder: Path, **provider: Any) -> Site:
    """A site of any kind of provider. Gemini's key is in the variable `KEY`, which the caller sets."""
    urls = {OPENAI: server.openai_url, OLLAMA: server.address, GEMINI: server.gemini_url}
    defaults = {"kind": kind, "base_url": urls[kind], "api_key_env": KEY if kind == GEMINI else ""}
    made = make_provider(**defaults | provider)
    return Site(server, folder, made, make_tenant(embedding_provider=made))


@pytest.fixture
def stage(transactional_db: None, tmp_path: Path) -> Iterator[Site]:
    """An OpenAI-compatible site with batches of four texts and deadlines of one second."""
    with ProviderServer(dimensions=DIMENSIONS) as server:
        yield make_site(OPENAI, server, tmp_path, batch_size=4, embedding_timeout_ms=1_000, query_timeout_ms=1_000)


class draining:
    """Drains the site's provider in a thread while the block runs, and joins it."""

    def __init__(self, site: Site, controls: Controls = sweep.CONTROLS) -> None:
        self._thread = threading.Thread(target=self._drain, args=(site.provider.pk, controls))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _drain(self, provider_id: int, controls: Controls) -> None:
        try:
            sweep.drain(provider_id, controls)
        finally:
            connection.close()


class TimedOut(Exception):
    """A provider timeout by its code alone."""

    code = OPENAI_COMPATIBLE_REQUEST_TIMEOUT


def two_dispatched(site: Site, *outcomes: RepositoryOutcome) -> list[Dispatched]:
    """One dispatched task for each of two outcomes, held by this test: two slots, where the lane has one."""
    held = {}
    for _ in outcomes:
        task = task_queue.admit(site.provider.pk, lambda cap: 2, "fair")
        assert task is not None
        held[task.outcome_id] = task
    return [held[outcome.pk] for outcome in outcomes]


def wait_finished(run: TenantRun, timeout: float = 30.0) -> TenantRun:
    """Waits for workers to carry out the run; the test advances it as beat would."""
    eventually(lambda: sweep.advance(run.pk).status not in RUN_UNFINISHED, timeout, 0.1, "the run finishes")
    return TenantRun.objects.get(pk=run.pk)


# --- texts and files ------------------------------------------------------------------------------------------------
def texts(word: str, count: int) -> list[str]:
    """Texts of the word and a number each."""
    return [f"{word} {number}" for number in range(count)]


def files_of(contents: Iterable[str]) -> dict[str, str]:
    """A file for each text, named by its number."""
    return {f"{number:03d}.txt": text for number, text in enumerate(contents)}


# --- what became of a run -------------------------------------------------------------------------------------------
def outcome_of(run: TenantRun, repository: Repository) -> RepositoryOutcome:
    return RepositoryOutcome.objects.get(run=run, repository=repository)


def codes_of(outcome: RepositoryOutcome) -> tuple[str, str, str]:
    return outcome.status, outcome.error_code, outcome.source_error_code


def all_codes(run: TenantRun, *repositories: Repository) -> list[tuple[str, str, str]]:
    """`codes_of` each repository's outcome."""
    return [codes_of(outcome_of(run, repository)) for repository in repositories]


def live_texts(repository: Repository) -> list[str]:
    """The texts of the repository's live rows, each of which has the vector of its own text."""
    rows = KnowledgeRow.objects.filter(repository=repository, version__is_live=True).order_by("version__file__path")
    for row in rows.exclude(vector=None):
        assert np.allclose(row.vector, vector_of(row.text, DIMENSIONS), atol=1e-6)
    return [row.text for row in rows]


def stored_rows(repository: Repository) -> set[int]:
    """The ids of the repository's rows that have a vector."""
    return set(KnowledgeRow.objects.filter(repository=repository, vector__isnull=False).values_list("pk", flat=True))


def stored(repository: Repository) -> int:
    """How many of the repository's rows have a vector."""
    return len(stored_rows(repository))


def tasks_in(state: TaskState, run: TenantRun | None = None) -> int:
    tasks = EmbeddingTask.objects.filter(state=state)
    return (tasks.filter(run=run) if run else tasks).count()


def slots_taken() -> int:
    return EmbeddingTask.objects.exclude(slot=None).count()


def calls_with(server: ProviderServer, word: str) -> list[tuple[str, ...]]:
    """The texts of each embedding call that carried the word."""
    return [call.texts for call in server.embedding_calls if any(word in text for text in call.texts)]
