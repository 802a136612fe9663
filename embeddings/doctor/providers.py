"""The model servers: what the rows say of them, and, only where it is asked for, whether they answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from embeddings.doctor.findings import Check, Finding, error, ok, warning
from embeddings.errors import ProviderConfigurationError, ProviderError, ProviderUnauthorized
from embeddings.management.rendering import printable
from embeddings.models import Provider, TenantRun
from embeddings.providers import adapter_for
from embeddings.providers.base import LIST_DEADLINE_S
from embeddings.reports import facts, run_facts
from embeddings.runtime.workers import START
from embeddings.states import TaskState
from embeddings.timeouts import ProviderTimeoutError
from project.runtime import event_loop

# Beat wakes workers every two seconds for work beside a free slot, and a lost lease is found after LEASE_MS.
_IDLE_TIMEOUT = timedelta(seconds=30)


def _providers() -> Iterable[Finding]:
    """Keys by their variables' names, lanes, and whether the newest run was stalled. Calls none of them."""
    found = list(facts.providers())
    if not found:
        advice = "manage.py provider set local --base-url http://127.0.0.1:8089/v1 --embedding-model NAME"
        yield warning("providers", "there is none yet", advice)
    oldest = _oldest_queued()
    for provider in found:
        yield _lane(provider, oldest.get(provider.pk))
        yield from _key(provider)
        yield from _circuit(provider)


def _oldest_queued() -> dict[int, datetime]:
    oldest: dict[int, datetime] = {}
    for (provider, _), (_, since) in facts.tasks_in(TaskState.QUEUED).items():
        oldest[provider] = min(since, oldest.get(provider, since))
    return oldest


def _lane(provider: Any, oldest: datetime | None) -> Finding:
    name, now = f"provider {provider}", timezone.now()
    waited = now - oldest if oldest else timedelta()
    depth = f"{provider.dispatched} at the server, {provider.queued} queued"
    if oldest:
        depth += f", the oldest for {waited.total_seconds():.0f} s"
    detail = f"{facts.provider_state(provider)}; {depth}"
    if provider.is_paused:
        return warning(name, detail, f"manage.py provider resume {provider}")
    timeout = timedelta(milliseconds=settings.LEASE_MS) + _IDLE_TIMEOUT
    is_idle = not provider.dispatched and not (provider.busy_until and provider.busy_until > now)
    if is_idle and waited > timeout:
        return warning(name, f"{detail}: nobody takes them to the server", START["embeddings"])
    return ok(name, detail)


def _key(provider: Provider) -> Iterable[Finding]:
    name, variable = f"key of provider {provider}", provider.api_key_env
    if not variable:
        return
    if os.environ.get(variable, "").strip():
        yield ok(name, f"{variable} is set here")
    else:
        yield error(name, f"{variable} is not set here", f"set {variable} for the web process and every worker")


def _circuit(provider: Provider) -> Iterable[Finding]:
    newest = TenantRun.objects.filter(provider=provider).select_related("circuit", "provider").order_by("-pk").first()
    if newest and (story := run_facts.circuit_story(newest)):
        yield warning(f"last run on {provider}", story, "look at the model server, then: manage.py sweep")


def _answers() -> Iterable[Finding]:
    """Asks each server once, bounded in time, for its models."""
    providers = list(facts.providers())

    async def ask_all() -> list[Finding | BaseException]:
        return await asyncio.gather(*map(_ask_server, providers), return_exceptions=True)

    # One server's reply may raise anything; the other servers' findings are still reported.
    for provider, found in zip(providers, event_loop.run(ask_all()), strict=True):
        if isinstance(found, Finding):
            yield found
        else:
            yield error(f"server of {provider}", f"could not be asked: {type(found).__name__}")


async def _ask_server(provider: Provider) -> Finding:
    name = f"server of {provider}"
    try:
        names = await adapter_for(provider).model_names()
    except (ProviderError, ProviderTimeoutError) as raised:
        return _of_error(name, provider, raised)
    wanted = [model for model in (provider.embedding_model, provider.chat_model) if model]
    missing = sorted(set(map(_bare, wanted)) - set(map(_bare, names)))
    if missing:
        return warning(name, f"answers, and does not list {', '.join(missing)}", "load the model, or correct its name")
    return ok(name, f"answers, and lists {', '.join(wanted)}")


def _of_error(name: str, provider: Provider, raised: ProviderError | ProviderTimeoutError) -> Finding:
    said = f"{raised.code}: {printable(str(raised))}"
    if isinstance(raised, ProviderUnauthorized | ProviderConfigurationError):
        return error(name, said, "correct its key")
    if getattr(raised, "status", None) == 404:
        return warning(name, f"answers at {provider.base_url}, and lists no models")
    return error(name, said, f"look whether the model server runs at {provider.base_url}")


def _bare(model: str) -> str:
    """A name as people write it: servers add a folder in front, or a tag behind."""
    return model.removeprefix("models/").removesuffix(":latest")


PROVIDERS = Check("providers", _providers)
SERVERS = Check("servers", _answers, bound_s=LIST_DEADLINE_S + 2.0)
