"""Rows for tests: each function makes one, valid, and unlike any other unless told otherwise."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from embeddings.models import (
    EmbeddingGeneration,
    EmbeddingTask,
    FileVersion,
    KnowledgeRow,
    Provider,
    Repository,
    RepositoryOutcome,
    RunCircuit,
    SourceFile,
    Tenant,
    TenantRun,
)

_numbers = itertools.count(1)


def make_provider(**values: Any) -> Provider:
    """An openai-compatible provider that nothing answers for, unless `base_url` says otherwise."""
    number = next(_numbers)
    defaults = {
        "name": f"provider-{number}",
        "base_url": f"http://provider-{number}.invalid/v1",
        "embedding_model": "embed",
        "chat_model": "chat",
    }
    return Provider.objects.create(**defaults | values)


def make_generation(provider: Provider, **values: Any) -> EmbeddingGeneration:
    """The generation of the provider's present embedding model."""
    defaults = {"model": provider.embedding_model, "dimensions": 4}
    return EmbeddingGeneration.objects.get_or_create(
        provider=provider, model=(defaults | values)["model"], defaults=defaults | values
    )[0]


def make_tenant(**values: Any) -> Tenant:
    """An active tenant; with a provider of its own unless `embedding_provider` is given, even as None."""
    if "embedding_provider" not in values:
        values["embedding_provider"] = make_provider()
    return Tenant.objects.create(**{"slug": f"tenant-{next(_numbers)}"} | values)


def make_repository(tenant: Tenant | None = None, **values: Any) -> Repository:
    """An enabled repository whose source need not exist."""
    number = next(_numbers)
    defaults = {"slug": f"repository-{number}", "source": f"/nowhere/{number}"}
    return Repository.objects.create(tenant=tenant or make_tenant(), **defaults | values)


def make_run(provider: Provider | None = None, **values: Any) -> TenantRun:
    """A queued run with its closed circuit."""
    provider = provider or make_provider()
    if "generation" not in values:
        values["generation"] = make_generation(provider)
    run = TenantRun.objects.create(provider=provider, **values)
    RunCircuit.objects.create(run=run)
    return run


def make_outcome(run: TenantRun, repository: Repository | None = None, **values: Any) -> RepositoryOutcome:
    """A pending outcome of the run."""
    repository = repository or make_repository(make_tenant(embedding_provider=run.provider))
    texts = {"tenant_slug": repository.tenant.slug, "repository_slug": repository.slug}
    return RepositoryOutcome.objects.create(run=run, repository=repository, **texts | values)


def make_task(outcome: RepositoryOutcome, **values: Any) -> EmbeddingTask:
    """A queued batch task of the outcome."""
    run = outcome.run
    facts = {"provider": run.provider, "generation": run.generation, "run": run, "outcome": outcome, "text_count": 1}
    return EmbeddingTask.objects.create(**facts | values)


def make_version(repository: Repository, generation: EmbeddingGeneration, **values: Any) -> FileVersion:
    """A half-made version of a file of the repository; `path` names the file."""
    number = next(_numbers)
    path = values.pop("path", f"file-{number}.py")
    file, _ = SourceFile.objects.get_or_create(repository=repository, path=path)
    return FileVersion.objects.create(**{"file": file, "generation": generation, "blob_oid": f"{number:040x}"} | values)


def make_row(version: FileVersion, **values: Any) -> KnowledgeRow:
    """A pending row of the version."""
    repository = version.file.repository
    number = next(_numbers)
    text = values.get("text", f"text {number}")
    facts = {
        "tenant": repository.tenant,
        "repository": repository,
        "version": version,
        "generation": version.generation,
        "ordinal": version.rows.count(),
        "start_line": 1,
        "end_line": 1,
        "text": text,
        "text_hash": hashlib.sha256(text.encode()).digest()[:16],
    }
    return KnowledgeRow.objects.create(**facts | values)
