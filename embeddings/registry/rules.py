"""The rules for providers, tenants and repositories beyond their fields' own validators.

Each rule raises Django's ValidationError, keyed by field, so that a form shows it beside the field; `one_line` turns it
into a line for a command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from django.conf import settings
from django.core.exceptions import ValidationError

from embeddings.errors import UsageError
from embeddings.knowledge.source import SourceRefused, matches, validate_ref, validate_source
from embeddings.models import Provider, Repository, Tenant
from embeddings.registry.base_url import normalise_base_url, same_server
from embeddings.states import ProviderKind

# The path of these kinds' OpenAI-compatible API. Their base URL is the root of their own API.
_SPEAKS_OPENAI_AT = {ProviderKind.OLLAMA: "/v1", ProviderKind.GEMINI: "/openai"}
_PATTERNS_MAX, _PATTERN_CHARACTERS_MAX, _REF_CHARACTERS_MAX = 200, 500, 250


def clean_provider(provider: Provider) -> None:
    """Normalises the base URL in place and checks every rule. Raises ValidationError."""
    _check(
        lambda: _take_base_url(provider),
        lambda: provider.full_clean(exclude={"base_url"}, validate_constraints=False),
        lambda: _base_url_is_the_root(provider),
        lambda: _lane_is_single(provider),
        lambda: _keeps_its_models(provider),
    )


def clean_tenant(tenant: Tenant) -> None:
    """Checks every rule: each provider needs the model that the tenant would use. Raises ValidationError."""
    _check(
        lambda: tenant.full_clean(validate_constraints=False),
        lambda: _has_model(tenant.embedding_provider, "embedding"),
        lambda: _has_model(tenant.chat_provider, "chat"),
    )


def clean_repository(repository: Repository) -> None:
    """Normalises source and ref in place and checks every rule. Raises ValidationError."""
    _check(
        lambda: _take_source(repository),
        lambda: _take_ref(repository),
        lambda: repository.full_clean(exclude={"source", "ref"}, validate_constraints=False),
        lambda: _check_patterns("include", repository.include),
        lambda: _check_patterns("exclude", repository.exclude),
        lambda: _one_repository_per_slug(repository),
    )


def one_line(subject: str, error: ValidationError) -> UsageError:
    """The same error as one line for a terminal: `subject: field: message`."""
    if not hasattr(error, "error_dict"):
        return UsageError(f"{subject}: {' '.join(error.messages)}")
    problems = (f"{field}: {' '.join(messages)}" for field, messages in error.message_dict.items())
    return UsageError(f"{subject}: {'; '.join(problems)}")


def _check(*rules: Callable[[], None]) -> None:
    """Runs every rule and raises all their errors together."""
    problems: dict[str, list[ValidationError]] = {}
    for rule in rules:
        try:
            rule()
        except ValidationError as refused:
            refused.update_error_dict(problems)
    if problems:
        raise ValidationError(problems)


def _take_base_url(provider: Provider) -> None:
    try:
        provider.base_url = normalise_base_url(provider.base_url)
    except ValidationError as refused:
        raise ValidationError({"base_url": refused}) from None
    for name, base_url in Provider.objects.exclude(pk=provider.pk).values_list("name", "base_url"):
        if same_server(base_url, provider.base_url):
            raise ValidationError(
                {
                    "base_url": f"Provider {name} already uses {base_url}: two providers on one server would bypass its "
                    f"single lane. Change {name} instead."
                }
            )


def _base_url_is_the_root(provider: Provider) -> None:
    for kind, suffix in _SPEAKS_OPENAI_AT.items():
        if provider.kind == kind and provider.base_url.endswith(suffix):
            raise ValidationError(
                {"base_url": f"The base URL of {kind} is its own root, without {suffix}: chat adds that by itself."}
            )


def _lane_is_single(provider: Provider) -> None:
    if provider.kind == ProviderKind.OPENAI_COMPATIBLE and provider.max_in_flight > 1:
        raise ValidationError(
            {
                "max_in_flight": f"An openai-compatible provider takes one embedding task at a time: "
                f"max_in_flight must be 1, not {provider.max_in_flight}."
            }
        )


def _keeps_its_models(provider: Provider) -> None:
    if not provider.embedding_model and not provider.chat_model:
        raise ValidationError({"embedding_model": "Give the provider an embedding model, a chat model or both."})
    if provider._state.adding:
        return
    for use in ("embedding", "chat"):
        user = Tenant.objects.filter(**{f"{use}_provider": provider}).order_by("slug").first()
        if user is not None and not getattr(provider, f"{use}_model"):
            raise ValidationError({f"{use}_model": f"Tenant {user} uses this provider's {use} model: name one."})


def _has_model(provider: Provider | None, use: Literal["embedding", "chat"]) -> None:
    if provider is not None and not getattr(provider, f"{use}_model"):
        hint = f"`manage.py provider set {provider} --{use}-model NAME`"
        raise ValidationError({f"{use}_provider": f"Provider {provider} has no {use} model: {hint} gives it one."})


def _take_source(repository: Repository) -> None:
    try:
        repository.source = validate_source(repository.source, settings.SOURCE_ROOTS)
    except SourceRefused as refused:
        raise ValidationError({"source": f"{refused}."}) from refused


def _take_ref(repository: Repository) -> None:
    try:
        repository.ref = validate_ref(repository.ref)
    except SourceRefused as refused:
        raise ValidationError({"ref": f"{refused}."}) from refused
    if len(repository.ref) > _REF_CHARACTERS_MAX:
        raise ValidationError({"ref": f"a ref has at most {_REF_CHARACTERS_MAX} characters."})


def _check_patterns(field: str, patterns: object) -> None:
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValidationError({field: 'Give a list of patterns, such as ["*.py", "docs/"].'})
    if len(patterns) > _PATTERNS_MAX:
        raise ValidationError({field: f"Give at most {_PATTERNS_MAX} patterns."})
    for pattern in patterns:
        if not _is_pattern(pattern):
            raise ValidationError({field: f"{pattern!r} is not a gitignore pattern."})


def _is_pattern(pattern: str) -> bool:
    if not pattern.strip() or len(pattern) > _PATTERN_CHARACTERS_MAX or not pattern.isprintable():
        return False
    try:
        matches("a", (pattern,), ())
    except ValueError:
        return False
    return True


def _one_repository_per_slug(repository: Repository) -> None:
    if repository.tenant_id is None or repository.removed_at is not None:
        return
    same = Repository.objects.filter(tenant=repository.tenant_id, slug=repository.slug, removed_at=None)
    if same.exclude(pk=repository.pk).exists():
        raise ValidationError({"slug": f"Tenant {repository.tenant} already has a repository {repository.slug}."})
