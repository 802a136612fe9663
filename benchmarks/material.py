"""What is swept: git repositories made of the installed Django's own source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import django

from benchmarks.stage import ScriptedServer, var_dir
from embeddings import registry
from embeddings.models import Provider, Repository, Tenant
from tests.support.git_repositories import GitRepository


def modules() -> Iterator[tuple[str, bytes]]:
    """Every module of Django: its path and content, in the order of their paths (some 900 files, 5.7 MB)."""
    root = Path(django.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), path.read_bytes()


def git_repository(name: str, files: dict[str, bytes]) -> Path:
    path = var_dir() / "sources" / name
    GitRepository(path).commit(files)
    return path


def parts(count: int, bytes_each: int) -> list[dict[str, bytes]]:
    """Modules in `count` shares of about `bytes_each`, no module in two of them."""
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


_numbers = itertools.count(1)


def provider(server: ScriptedServer, **values: object) -> Provider:
    """One more provider at the scripted server, which answers under any path: its own lane, its own generation."""
    return provider_at(f"{server.address}/{next(_numbers)}/v1", **values)


def provider_at(base_url: str, **values: object) -> Provider:
    values = {"kind": "openai-compatible", "base_url": base_url, "embedding_model": "embed", **values}
    return registry.set_provider(f"provider-{next(_numbers)}", values).provider


def tenant(of: Provider) -> Tenant:
    return Tenant.objects.create(slug=f"tenant-{next(_numbers)}", embedding_provider=of)


def repository(of: Tenant, source: Path) -> Repository:
    return Repository.objects.create(tenant=of, slug=source.name, source=str(source))
