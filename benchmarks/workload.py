"""The material of the benchmarks: git repositories of the installed Django's source, and the rows to sweep them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import django

from benchmarks.sandbox import ScriptedServer, var_dir
from embeddings import registry
from embeddings.models import Provider, Repository, Tenant, TenantRun
from embeddings.states import RUN_UNFINISHED
from project.local.processes import within
from tests.support.git_repositories import GitRepository

_RUN_LONGEST_S = 120.0
_numbers = itertools.count(1)


def modules() -> Iterator[tuple[str, bytes]]:
    """Path and content of every module of Django, ordered by path (some 900 files, 5.7 MB)."""
    root = Path(django.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), path.read_bytes()


def git_repository(name: str, files: dict[str, bytes]) -> Path:
    path = var_dir() / "sources" / name
    GitRepository(path).commit(files)
    return path


def parts(count: int, bytes_each: int) -> list[dict[str, bytes]]:
    """Divides modules into `count` disjoint shares of about `bytes_each`."""
    files = modules()
    shares: list[dict[str, bytes]] = []
    for _ in range(count):
        share: dict[str, bytes] = {}
        for path, content in files:
            share[path] = content
            if sum(map(len, share.values())) >= bytes_each:
                break
        shares.append(share)
    return shares


def provider(server: ScriptedServer, **values: object) -> Provider:
    """A new provider, with its own lane and generation, at the scripted server, which answers under any path."""
    return provider_at(f"{server.address}/{next(_numbers)}/v1", **values)


def provider_at(base_url: str, **values: object) -> Provider:
    values = {"kind": "openai-compatible", "base_url": base_url, "embedding_model": "embed", **values}
    return registry.set_provider(f"provider-{next(_numbers)}", values).provider


def tenant(of: Provider) -> Tenant:
    return Tenant.objects.create(slug=f"tenant-{next(_numbers)}", embedding_provider=of)


def repository(of: Tenant, source: Path) -> Repository:
    return Repository.objects.create(tenant=of, slug=source.name, source=str(source))


def await_end(runs: Iterable[TenantRun]) -> None:
    """Waits until the runs have finished, up to two minutes; something else carries them out."""
    unfinished = TenantRun.objects.filter(pk__in=[run.pk for run in runs], status__in=RUN_UNFINISHED)
    assert within(lambda: not unfinished.exists(), _RUN_LONGEST_S), "the sweep did not end"
