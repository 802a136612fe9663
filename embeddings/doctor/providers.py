"""Checks of the model servers: of their rows, and on request of the servers themselves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.conf import settings

from embeddings.doctor.findings import Finding, check, error, ok, warning
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


@check("providers")
def check_providers() -> Iterable[Finding]:
    """Each provider's lane, whether its key is set, and whether its newest run stalled. Calls no model server."""
    found = list(facts.providers())
    if not found:
        advice = "manage.py provider set local --base-url http://127.0.0.1:8089/v1 --embedding-model NAME"
        yield warning("providers", "there is none yet", advice)
    longest: dict[int, timedelta] = {}
    for (key, _), (_, waited) in facts.tasks_in(TaskState.QUEUED).items():
        longest[key] = max(waited, longest.get(key, waited))
    for provider in found:
        yield _lane(provider, longest.get(provider.pk, timedelta()))
        if variable := provider.api_key_env:
            name = f"key of provider {provider}"
            if os.environ.get(variable, "").strip():
                yield ok(name, f"{variable} is set here")
            else:
                advice = f"set {variable} for the web process and every worker"
                yield error(name, f"{variable} is not set here", advice)
        newest = TenantRun.objects.filter(provider=provider).select_related("circuit", "provider").order_by("-pk")
        if (run := newest.first()) and (story := run_facts.circuit_story(run)):
            yield warning(f"last run on {provider}", story, "look at the model server, then: manage.py sweep")


def _lane(provider: Any, waited: timedelta) -> Finding:
    name = f"provider {provider}"
    depth = f"{provider.dispatched} at the server, {provider.queued} queued"
    if provider.queued:
        depth += f", the oldest for {waited.total_seconds():.0f} s"
    detail = f"{facts.provider_state(provider)}; {depth}"
    if provider.is_paused:
        return warning(name, detail, f"manage.py provider resume {provider}")
    timeout = timedelta(milliseconds=settings.LEASE_MS) + _IDLE_TIMEOUT
    is_idle = not provider.dispatched and not provider.is_busy
    if is_idle and waited > timeout:
        return warning(name, f"{detail}: no worker sends them to the server", START["embeddings"])
    return ok(name, detail)


@check("servers", bound_s=LIST_DEADLINE_S + 2.0)
def check_servers() -> Iterable[Finding]:
    """Asks each server once for its models, with a deadline."""
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
        detail = f"{raised.code}: {printable(str(raised))}"
        if isinstance(raised, ProviderUnauthorized | ProviderConfigurationError):
            return error(name, detail, "correct its key")
        if getattr(raised, "status", None) == 404:
            return warning(name, f"answers at {provider.base_url}, and lists no models")
        return error(name, detail, f"check that the model server runs at {provider.base_url}")
    wanted = [model for model in (provider.embedding_model, provider.chat_model) if model]
    missing = sorted(set(map(_bare, wanted)) - set(map(_bare, names)))
    if missing:
        return warning(name, f"answers, and does not list {', '.join(missing)}", "load the model, or correct its name")
    return ok(name, f"answers, and lists {', '.join(wanted)}")


def _bare(model: str) -> str:
    """The name without the `models/` prefix or `:latest` tag that servers add."""
    return model.removeprefix("models/").removesuffix(":latest")
