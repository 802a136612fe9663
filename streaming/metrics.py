"""`/metrics`: computed from the rows at every scrape, so every process gives the same figures. No label names a tenant."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from datetime import timedelta
from urllib.parse import urlsplit

from django.conf import settings
from django.db.models import Count, Q, QuerySet, Sum
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from embeddings.models import Provider, RunCircuit, TenantRun
from embeddings.reports.facts import tasks_in
from embeddings.states import CircuitState, RunStatus, TaskPriority, TaskState
from project.runtime.database_threads import in_database
from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TURN_UNFINISHED, TurnState

FIRST_CONTENT_MS = (50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000)
GAP_MS = (50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000)


async def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus' text format. Needs METRICS_TOKEN as bearer token; while none is set, a request on loopback."""
    if not _may_read(request):
        return HttpResponse("Set METRICS_TOKEN, and send it as `Authorization: Bearer ...`.\n", status=403)
    return HttpResponse(await in_database(_text), content_type=CONTENT_TYPE_LATEST)


def _may_read(request: HttpRequest) -> bool:
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    if settings.METRICS_TOKEN:
        return hmac.compare_digest(sent, settings.METRICS_TOKEN.encode())
    # A proxy on this machine forwards requests from other machines, with their Host or with headers that name them.
    is_passed_on = any(name in request.headers for name in ("X-Forwarded-For", "X-Real-IP", "Forwarded", "Via"))
    # A request through a unix socket has no address; it most likely came from a proxy.
    address, host = request.META.get("REMOTE_ADDR", ""), request.headers.get("Host", "")
    return not is_passed_on and _is_loopback(address) and _is_loopback(_name_in(host))


def _name_in(host: str) -> str:
    """The host name or address of a Host header, without its port; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _text() -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Rows())
    return generate_latest(registry)


class _Rows(Collector):
    def collect(self) -> Iterable[Metric]:
        yield from _turns()
        yield from _attempts()
        yield from _lane()
        yield from _runs()


def _turns() -> Iterable[Metric]:
    counted = dict(ChatTurn.objects.order_by().values_list("state").annotate(Count("pk")))
    ended = CounterMetricFamily("sluicegate_chat_turns", "Chat turns by their end state.", labels=["state"])
    active = GaugeMetricFamily("sluicegate_chat_turns_active", "Chat turns that have not ended.", labels=["state"])
    for state in TurnState:
        (active if state in TURN_UNFINISHED else ended).add_metric([state], counted.get(state, 0))
    return [ended, active]


def _attempts() -> Iterable[Metric]:
    attempts = ChatAttempt.objects.order_by()
    ended = CounterMetricFamily(
        "sluicegate_chat_attempts", "Calls to chat providers by how they ended.", labels=["state", "kind"]
    )
    fired = CounterMetricFamily(
        "sluicegate_chat_watchdog_firings", "Attempts that the watchdog ended, by kind.", labels=["kind"]
    )
    for state, kind, number in attempts.values_list("end_state", "error_kind").annotate(Count("pk")):
        ended.add_metric([state, kind], number)
        if state in (TurnState.IDLE_TIMEOUT, TurnState.LIFETIME_EXCEEDED) or kind == "headers_timeout":
            fired.add_metric([kind], number)
    yield ended
    yield fired
    yield _histogram(
        "sluicegate_chat_first_content_seconds",
        "From an attempt's start to its first content.",
        attempts,
        "first_content_ms",
        FIRST_CONTENT_MS,
    )
    yield _histogram(
        "sluicegate_chat_longest_gap_seconds",
        "The longest silence within an attempt.",
        attempts,
        "longest_gap_ms",
        GAP_MS,
    )


def _lane() -> Iterable[Metric]:
    depth = GaugeMetricFamily(
        "sluicegate_lane_depth", "Embedding tasks that wait for their provider.", labels=["provider", "priority"]
    )
    wait = GaugeMetricFamily(
        "sluicegate_lane_oldest_wait_seconds",
        "How long the oldest of them has waited.",
        labels=["provider", "priority"],
    )
    busy = GaugeMetricFamily("sluicegate_lane_dispatched", "Embedding tasks at their provider.", labels=["provider"])
    queued = tasks_in(TaskState.QUEUED)
    dispatched = tasks_in(TaskState.DISPATCHED)
    for provider, name in Provider.objects.order_by("name").values_list("pk", "name"):
        for priority in TaskPriority:
            number, waited = queued.get((provider, priority), (0, timedelta()))
            depth.add_metric([name, priority.name.lower()], number)
            wait.add_metric([name, priority.name.lower()], waited.total_seconds())
        busy.add_metric([name], sum(dispatched.get((provider, priority), (0,))[0] for priority in TaskPriority))
    return [depth, wait, busy]


def _runs() -> Iterable[Metric]:
    opened = CounterMetricFamily(
        "sluicegate_circuits_opened", "Circuits that a final provider timeout has opened.", labels=["source"]
    )
    open_ones = RunCircuit.objects.filter(state=CircuitState.OPEN).order_by()
    for source, number in open_ones.values_list("source_error_code").annotate(Count("pk")):
        opened.add_metric([source], number)
    runs = CounterMetricFamily("sluicegate_runs", "Runs by their status.", labels=["status"])
    counted = dict(TenantRun.objects.order_by().values_list("status").annotate(Count("pk")))
    for status in RunStatus:
        runs.add_metric([status], counted.get(status, 0))
    return [opened, runs]


def _histogram(
    name: str, words: str, rows: QuerySet[ChatAttempt], field: str, bounds_ms: Sequence[int]
) -> HistogramMetricFamily:
    """Cumulative counts of `field` (milliseconds) up to each bound, counted by the database; in seconds."""
    known = rows.exclude(**{field: None})
    within = {f"le_{bound}": Count("pk", filter=Q(**{f"{field}__lte": bound})) for bound in bounds_ms}
    counts = known.aggregate(**within, total=Count("pk"), sum=Coalesce(Sum(field), 0))
    buckets = [(str(bound / 1000), counts[f"le_{bound}"]) for bound in bounds_ms]
    family = HistogramMetricFamily(name, words)
    family.add_metric([], [*buckets, ("+Inf", counts["total"])], counts["sum"] / 1000)
    return family
