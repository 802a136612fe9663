"""Tenants, their repositories, and the runs over them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.utils import timezone

from embeddings.dispatch import task_queue
from embeddings.doctor.findings import Check, Finding, ok, warning
from embeddings.models import Repository, TenantRun
from embeddings.reports import facts, overview, run_facts
from embeddings.runs import orphaned_runs, schedule
from embeddings.runtime.workers import START_BEAT
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED

# Beat looks every half minute; a repository that a run has is not overdue.
OVERDUE_AFTER = timedelta(minutes=10)


def _runs() -> Iterable[Finding]:
    abandoned = orphaned_runs.orphaned_runs()
    for run in abandoned:
        since = facts.moment(run.alive_until)
        detail = f"{run.status} on {run.provider}, and nobody has attended it since {since}"
        yield warning(f"run {run_facts.short_id(run)}", detail, "manage.py sweep ends it, and goes on from its rows")
    alive = TenantRun.objects.filter(status__in=RUN_UNFINISHED).count() - len(abandoned)
    yield ok("runs", f"{alive} at work")
    if stranded := task_queue.stranded_tasks().count():
        detail = f"{stranded} queued for an outcome that is decided: nothing dispatches them"
        yield warning("embedding tasks", detail, f"the next sweep removes them, and so does beat: {START_BEAT}")


def _repositories() -> Iterable[Finding]:
    troubled = overview.troubled_repositories()
    runs = TenantRun.objects.in_bulk([each.last["run_id"] for each in _swept(troubled)])
    for repository in troubled:
        yield _trouble(repository, runs)
    if not troubled:
        yield ok("repositories", f"{schedule.sweepable().count()} enabled, none of them failing")
    yield from _overdue()


def _swept(repositories: Iterable[Any]) -> list[Any]:
    return [repository for repository in repositories if repository.last]


def _trouble(repository: Any, runs: dict[int, TenantRun]) -> Finding:
    name, last = f"repository {repository}", repository.last
    if not last:
        return warning(name, f"failed {repository.consecutive_failures} times in a row")
    reason = f" ({last['error_code']})" if last["error_code"] else ""
    failures = repository.consecutive_failures
    detail = f"{last['status']}{reason}" + (f", {failures} failures in a row" if failures else "")
    return warning(name, detail, f"manage.py runs show {run_facts.short_id(runs[last['run_id']])}")


def _overdue() -> Iterable[Finding]:
    late = schedule.sweepable().filter(next_due_at__lt=timezone.now() - OVERDUE_AFTER).order_by("next_due_at", "pk")
    late = late.filter(tenant__embedding_provider__is_paused=False).exclude(outcomes__status__in=OUTCOME_UNFINISHED)
    first = late.select_related("tenant").first()
    if first is not None:
        since = facts.moment(first.next_due_at)
        yield warning("schedule", f"{late.count()} overdue, {first} the longest, since {since}", START_BEAT)


def _tenants() -> Iterable[Finding]:
    active = [tenant for tenant in facts.tenants() if tenant.is_active]
    if not active:
        yield warning("tenants", "there is none yet", "manage.py tenant add acme --embedding-provider NAME")
        return
    for tenant in active:
        for lack, advice in _lacks(tenant):
            yield warning(f"tenant {tenant}", lack, f"manage.py {advice}")
    yield ok("tenants", f"{len(active)} active, {Repository.objects.filter(removed_at=None).count()} repositories")


def _lacks(tenant: Any) -> Iterable[tuple[str, str]]:
    if tenant.embedding_provider is None:
        yield "no embedding provider: it is not swept or searched", f"tenant set {tenant} --embedding-provider NAME"
    if tenant.chat_provider is None:
        yield "no chat provider", f"tenant set {tenant} --chat-provider NAME"
    if not tenant.key_count:
        yield "no key: the endpoints are closed to it", f"key issue {tenant}"


RUNS = Check("runs", _runs)
REPOSITORIES = Check("repositories", _repositories)
TENANTS = Check("tenants", _tenants)
