"""A sweep on a stage: a scripted model server, real git repositories, and the run carried out in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.dispatch.drain import Controls
from embeddings.models import KnowledgeRow, Provider, Repository, RepositoryOutcome, Tenant, TenantRun
from embeddings.runs import sweep
from embeddings.states import RUN_UNFINISHED, RunTrigger
from tests.support.factories import make_provider, make_repository, make_tenant
from tests.support.git_repositories import GitRepository
from tests.support.provider_server import ProviderServer, vector_of
from tests.support.waiting import eventually

DIMENSIONS = 8


@dataclass
class Stage:
    """One model server, its provider and tenant; `git` holds each repository's source by slug.

    A text of a repository is a file of its own, so that it is one row.
    """

    server: ProviderServer
    folder: Path
    provider: Provider
    tenant: Tenant
    git: dict[str, GitRepository] = field(default_factory=dict)

    def repository(self, slug: str, *texts: str, tenant: Tenant | None = None, **values: Any) -> Repository:
        """A repository of one file for each text."""
        owner = tenant or self.tenant
        source = GitRepository(self.folder / owner.slug / slug)
        source.commit({f"{number:03d}.txt": text for number, text in enumerate(texts)})
        self.git[slug] = source
        return make_repository(owner, slug=slug, source=str(source.path), **values)

    def start(self, *repositories: Repository, concurrency: int = 2) -> TenantRun:
        again = Repository.objects.select_related("tenant__embedding_provider").in_bulk(
            [one.pk for one in repositories]
        )
        chosen = [again[one.pk] for one in repositories]
        (run,) = sweep.start(chosen, trigger=RunTrigger.COMMAND, concurrency=concurrency)
        return run

    def carry_out(self, run: TenantRun, controls: Controls = sweep.CONTROLS, timeout: float = 30.0) -> TenantRun:
        """Scans, drains and advances in this thread until the run has finished."""

        def finished() -> bool:
            while sweep.scan_next(run.pk):
                pass
            sweep.drain(run.provider_id, controls)
            return sweep.advance(run.pk).status not in RUN_UNFINISHED

        eventually(finished, timeout=timeout, message="the run finishes")
        run.refresh_from_db()
        return run

    def swept(self, *repositories: Repository, **options: Any) -> TenantRun:
        """A whole sweep."""
        return self.carry_out(self.start(*repositories, **options))

    def scan(self, run: TenantRun) -> None:
        """Scans what the run's concurrency allows; nothing is drained."""
        while sweep.scan_next(run.pk):
            pass

    def paused(self, is_paused: bool) -> None:
        Provider.objects.filter(pk=self.provider.pk).update(is_paused=is_paused)


@pytest.fixture
def stage(transactional_db: None, tmp_path: Path) -> Iterator[Stage]:
    with make_stage(tmp_path) as made:
        yield made


@contextlib.contextmanager
def make_stage(folder: Path, **values: Any) -> Iterator[Stage]:
    with ProviderServer(dimensions=DIMENSIONS) as server:
        facts = {"batch_size": 4, "embedding_timeout_ms": 1_000, "query_timeout_ms": 1_000}
        provider = make_provider(base_url=server.openai_url, **facts | values)
        yield Stage(server, folder, provider, make_tenant(embedding_provider=provider))


def outcome_of(run: TenantRun, repository: Repository) -> RepositoryOutcome:
    return RepositoryOutcome.objects.get(run=run, repository=repository)


def codes_of(outcome: RepositoryOutcome) -> tuple[str, str, str]:
    return outcome.status, outcome.error_code, outcome.source_error_code


def live_texts(repository: Repository) -> list[str]:
    """The texts of the repository's live rows, each of which has the vector of its own text."""
    rows = KnowledgeRow.objects.filter(repository=repository, version__is_live=True).order_by("version__file__path")
    for row in rows.exclude(vector=None):
        assert np.allclose(row.vector, vector_of(row.text, DIMENSIONS), atol=1e-6)
    return [row.text for row in rows]


def calls_with(server: ProviderServer, word: str) -> list[tuple[str, ...]]:
    """The texts of each embedding call that carried the word."""
    return [call.texts for call in server.embedding_calls if any(word in text for text in call.texts)]


def texts(word: str, count: int) -> Iterable[str]:
    return [f"{word} {number}" for number in range(count)]
