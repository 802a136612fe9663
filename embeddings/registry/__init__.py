"""The operations on tenants, keys, providers and repositories (docs/architecture.md, Commands).

The commands, the admin and the endpoints parse their input, call one of these, and render the result.
"""

from embeddings.registry.keys import KeyScope, allows, authenticate, find_key, issue_key, revoke_key
from embeddings.registry.names import (
    find_active_tenant,
    find_provider,
    find_repository,
    find_tenant,
    match_repositories,
    require_sweepable,
    select_repositories,
)
from embeddings.registry.providers import (
    ProviderChange,
    notes_on,
    pause_provider,
    resume_provider,
    save_provider,
    set_provider,
)
from embeddings.registry.repositories import (
    RepositoryChange,
    add_repository,
    remove_repository,
    repository_notes,
    save_repository,
    set_repository,
)
from embeddings.registry.rules import clean_provider, clean_repository, clean_tenant
from embeddings.registry.tenants import TenantChange, add_tenant, remove_tenant, save_tenant, set_tenant

__all__ = [
    "KeyScope",
    "ProviderChange",
    "RepositoryChange",
    "TenantChange",
    "add_repository",
    "add_tenant",
    "allows",
    "authenticate",
    "clean_provider",
    "clean_repository",
    "clean_tenant",
    "find_active_tenant",
    "find_key",
    "find_provider",
    "find_repository",
    "find_tenant",
    "issue_key",
    "match_repositories",
    "notes_on",
    "pause_provider",
    "remove_repository",
    "remove_tenant",
    "repository_notes",
    "require_sweepable",
    "resume_provider",
    "revoke_key",
    "save_provider",
    "save_repository",
    "save_tenant",
    "select_repositories",
    "set_provider",
    "set_repository",
    "set_tenant",
]
