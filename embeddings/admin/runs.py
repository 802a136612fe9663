"""Runs and their outcomes."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Case, QuerySet, When
from django.http import HttpRequest, HttpResponseBase
from unfold.contrib.filters.admin import ChoicesDropdownFilter, RelatedDropdownFilter
from unfold.forms import BaseDialogForm

from embeddings import codes
from embeddings.admin.filters import CodeFilter, OutcomeTenantFilter, RunTenantFilter
from embeddings.admin.parts import LABELS, FactsInline, FactsPage, bulk, column, confirmed, link, moment_column
from embeddings.models import RepositoryOutcome, TenantRun
from embeddings.reports import run_facts
from embeddings.reports.facts import moment
from embeddings.runs import sweep
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED

_COUNTS = ("files", "rows", "embedded", "reused", "pending", "undeliverable", "provider_calls")


class OutcomeInline(FactsInline):
    model = RepositoryOutcome
    fields = ("page", "state", "reason", "resumes", *_COUNTS, "seconds")
    readonly_fields = fields
    verbose_name_plural = "outcomes"
    hide_title = True
    show_change_link = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[RepositoryOutcome]:
        found: QuerySet[RepositoryOutcome] = super().get_queryset(request).select_related("repository")
        # Operators look first for the outcome that stalled, then for those that were spared.
        trouble = Case(When(error_code=codes.PROVIDER_TIMED_OUT, then=0), When(error_code="", then=2), default=1)
        return found.order_by(trouble, "tenant_slug", "repository_slug")

    @column("repository")
    def page(self, outcome: RepositoryOutcome) -> str:
        return link(outcome, outcome)

    @column("outcome", label=LABELS)
    def state(self, outcome: RepositoryOutcome) -> str:
        return outcome.status

    @column("seconds")
    def seconds(self, outcome: RepositoryOutcome) -> str:
        return run_facts.outcome_seconds(outcome)

    @column("reason")
    def reason(self, outcome: RepositoryOutcome) -> str:
        return run_facts.reason(outcome) or "-"

    @column("swept next")
    def resumes(self, outcome: RepositoryOutcome) -> str:
        repository = outcome.repository
        return "removed" if repository.removed_at else moment(repository.next_due_at) or "-"


@admin.register(TenantRun)
class TenantRunAdmin(FactsPage):
    empty_hint = (
        "No run yet. Tick repositories or tenants in their list and choose \u201cSweep now\u201d, "
        "or wait for the schedule."
    )
    list_display = (
        "short",
        "provider",
        "state",
        "circuit_state",
        "stalled_on",
        "spared",
        "progress",
        "failed",
        "trigger",
        "created",
        "took",
    )
    list_filter = (
        ("status", ChoicesDropdownFilter),
        ("circuit__state", ChoicesDropdownFilter),
        ("provider", RelatedDropdownFilter),
        RunTenantFilter,
        ("trigger", ChoicesDropdownFilter),
    )
    search_fields = ("public_id",)
    ordering = ("-pk",)
    inlines = (OutcomeInline,)
    actions = ("cancel",)
    actions_detail = ("cancel_one",)
    change_form_before_template = "embeddings/admin/run_story.html"
    fields = (
        ("public_id", "provider"),
        ("state", "circuit_state"),
        ("generation", "trigger"),
        ("created", "started"),
        ("finished", "cancelled"),
        "concurrency",
    )
    readonly_fields = (
        "state",
        "circuit_state",
        "generation",
        "public_id",
        "created",
        "started",
        "finished",
        "cancelled",
    )
    created = moment_column("created_at", "created")
    started = moment_column("started_at", "started")
    finished = moment_column("finished_at", "finished")
    cancelled = moment_column("cancel_requested_at", "cancel requested")

    def offers(self, name: str, row: TenantRun) -> bool:
        return row.status in RUN_UNFINISHED

    def get_queryset(self, request: HttpRequest) -> QuerySet[TenantRun]:
        return run_facts.runs().select_related("generation")

    @column("run", ordering="pk")
    def short(self, run: TenantRun) -> str:
        return run_facts.short_id(run)

    @column("status", label=LABELS)
    def state(self, run: TenantRun) -> str:
        return run.status

    @column("circuit", label=LABELS)
    def circuit_state(self, run: TenantRun) -> str:
        return run.circuit.state

    @column("stalled on")
    def stalled_on(self, run: TenantRun) -> str:
        circuit = run.circuit
        return f"{circuit.opened_by} ({circuit.source_error_code})" if circuit.opened_by else "-"

    @column("spared", ordering="spared_count")
    def spared(self, run: Any) -> int:
        return int(run.spared_count)

    @column("repositories", ordering="outcome_count")
    def progress(self, run: Any) -> str:
        done = run.outcome_count - run.unfinished_count
        return f"{done} of {run.outcome_count} decided" if run.unfinished_count else str(run.outcome_count)

    @column("failed", ordering="failed_count")
    def failed(self, run: Any) -> int:
        return int(run.failed_count)

    @column("seconds")
    def took(self, run: TenantRun) -> str:
        seconds = run_facts.seconds_of(run)
        return "-" if seconds is None else f"{seconds:.1f}"

    @bulk("Cancel the unfinished part", permission="operate")
    def cancel(self, request: HttpRequest, queryset: QuerySet[TenantRun]) -> None:
        unfinished = list(queryset.filter(status__in=RUN_UNFINISHED))
        for run in unfinished:
            sweep.request_cancel(run)
        self.done(request, f"{len(unfinished)} runs cancelled; embedded rows are kept.")

    @confirmed("Cancel", "Cancels the unfinished part; embedded rows are kept.", icon="cancel", permission="operate")
    def cancel_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        run = self.chosen(request, object_id)
        if run.status in RUN_UNFINISHED:
            sweep.request_cancel(run)
            self.done(request, "Cancelled; embedded rows are kept.")
        else:
            self.done(request, f"This run is {run.status} already.")
        return self.back_to(request, run)


@admin.register(RepositoryOutcome)
class RepositoryOutcomeAdmin(FactsPage):
    empty_hint = "No outcome yet: each repository of a run gets one."
    list_display = ("name", "run_page", "state", "reason", *_COUNTS, "finished")
    list_display_links = ("name",)
    list_filter = (
        ("status", ChoicesDropdownFilter),
        CodeFilter,
        OutcomeTenantFilter,
        ("run__provider", RelatedDropdownFilter),
        ("run__circuit__state", ChoicesDropdownFilter),
    )
    list_select_related = ("run",)
    search_fields = ("tenant_slug", "repository_slug", "revision")
    ordering = ("-pk",)
    actions = ("cancel",)
    fields = (
        ("name", "run_page", "state"),
        ("error_code", "source_error_code"),
        "error_detail",
        ("revision", "skipped"),
        _COUNTS[:4],
        _COUNTS[4:],
        ("started", "finished"),
        "scan_losses",
    )
    readonly_fields = ("name", "run_page", "state", "skipped", "started", "finished")
    started = moment_column("started_at", "started")
    finished = moment_column("finished_at", "finished")

    @column("reason", ordering="error_code")
    def reason(self, outcome: RepositoryOutcome) -> str:
        return run_facts.reason(outcome) or "-"

    @column("repository", ordering="repository_slug")
    def name(self, outcome: RepositoryOutcome) -> str:
        return str(outcome)

    @column("run", ordering="run")
    def run_page(self, outcome: RepositoryOutcome) -> str:
        return link(outcome.run, run_facts.short_id(outcome.run))

    @column("outcome", label=LABELS)
    def state(self, outcome: RepositoryOutcome) -> str:
        return outcome.status

    @bulk("Cancel", permission="operate")
    def cancel(self, request: HttpRequest, queryset: QuerySet[RepositoryOutcome]) -> None:
        unfinished = list(queryset.filter(status__in=OUTCOME_UNFINISHED))
        for outcome in unfinished:
            sweep.cancel_outcome(outcome)
        self.done(request, f"{len(unfinished)} repositories cancelled in their runs.")
