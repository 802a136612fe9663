"""Checks of tenants, repositories and runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from django.db.models.functions import Now

from embeddings.dispatch import task_queue
from embeddings.doctor.findings import Finding, check, ok, warning
from embeddings.models import Repository, TenantRun
from embeddings.reports import facts, overview, run_facts
from embeddings.runs import orphaned_runs, schedule
from embeddings.runtime.workers import START_BEAT
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED

# Beat starts due repositories every 30 seconds.
OVERDUE_AFTER = timedelta(minutes=10)


@check("runs")
def check_runs() -> Iterable[Finding]:
    abandoned = orphaned_runs.orphaned_runs()
    for run in abandoned:
        since = facts.moment(run.alive_until)
        detail = f"{run.status} on {run.provider}, and without a heartbeat since {since}"
        yield warning(f"run {run_facts.short_id(run)}", detail, "manage.py sweep ends it and continues from its rows")
    alive = TenantRun.objects.filter(status__in=RUN_UNFINISHED).count() - len(abandoned)
    yield ok("runs", f"{alive} at work")
    if stranded := task_queue.stranded_tasks().count():
        detail = f"{stranded} queued for an outcome that is decided: nothing dispatches them"
        yield warning("embedding tasks", detail, f"the next sweep removes them, and so does beat: {START_BEAT}")


@check("repositories")
def check_repositories() -> Iterable[Finding]:
    troubled: Sequence[Any] = overview.troubled_repositories()
    runs = TenantRun.objects.in_bulk([each.last["run_id"] for each in troubled if each.last])
    for repository in troubled:
        name, last, failures = f"repository {repository}", repository.last, repository.consecutive_failures
        if not last:
            yield warning(name, f"failed {failures} times in a row")
            continue
        reason = f" ({last['error_code']})" if last["error_code"] else ""
        detail = f"{last['status']}{reason}" + (f", {failures} failures in a row" if failures else "")
        yield warning(name, detail, f"manage.py runs show {run_facts.short_id(runs[last['run_id']])}")
    if not troubled:
        yield ok("repositories", f"{schedule.sweepable().count()} enabled, none of them failing")
    late = schedule.sweepable().filter(next_due_at__lt=Now() - OVERDUE_AFTER).order_by("next_due_at", "pk")
    # A repository that an unfinished run has is not overdue.
    late = late.filter(tenant__embedding_provider__is_paused=False).exclude(outcomes__status__in=OUTCOME_UNFINISHED)
    first = late.select_related("tenant").first()
    if first is not None:
        since = facts.moment(first.next_due_at)
        yield warning("schedule", f"{late.count()} overdue, {first} the longest, since {since}", START_BEAT)


@check("tenants")
def check_tenants() -> Iterable[Finding]:
    active: list[Any] = [tenant for tenant in facts.tenants() if tenant.is_active]
    if not active:
        yield warning("tenants", "there is none yet", "manage.py tenant add acme --embedding-provider NAME")
        return
    for tenant in active:
        name, change = f"tenant {tenant}", f"manage.py tenant set {tenant}"
        if tenant.embedding_provider is None:
            yield warning(
                name, "no embedding provider: it is not swept or searched", f"{change} --embedding-provider NAME"
            )
        if tenant.chat_provider is None:
            yield warning(name, "no chat provider", f"{change} --chat-provider NAME")
        if not tenant.key_count:
            yield warning(name, "no key: the endpoints are closed to it", f"manage.py key issue {tenant}")
    yield ok("tenants", f"{len(active)} active, {Repository.objects.filter(removed_at=None).count()} repositories")
