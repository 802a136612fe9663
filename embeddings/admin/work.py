"""Embedding tasks and knowledge rows."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import BooleanField, ExpressionWrapper, Model, Q, QuerySet
from django.http import HttpRequest
from unfold.contrib.filters.admin import ChoicesDropdownFilter, RelatedDropdownFilter
from unfold.paginator import InfinitePaginator

from embeddings.admin.filters import CodeFilter, RepositoryFilter, RowStateFilter
from embeddings.admin.parts import LABELS, FactsPage, bulk, column, link, moment_column
from embeddings.knowledge import store
from embeddings.models import EmbeddingTask, KnowledgeRow, Repository
from embeddings.reports import run_facts
from embeddings.states import TaskState


class _TextsForSuperusers(FactsPage):
    """A page whose field `texts` only superusers see."""

    texts: str

    def get_fields(self, request: HttpRequest, obj: Model | None = None) -> list[Any]:
        fields = list(super().get_fields(request, obj))
        return [*fields, self.texts] if request.user.is_superuser else fields

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> list[Any]:
        fields = list(super().get_readonly_fields(request, obj))
        return [*fields, self.texts] if request.user.is_superuser else fields


@admin.register(EmbeddingTask)
class EmbeddingTaskAdmin(_TextsForSuperusers):
    empty_hint = "No embedding task: sweeps and searches create them."
    # Counting the many settled tasks would be slow, and their number is of no use.
    paginator = InfinitePaginator
    list_display = (
        "id",
        "state_label",
        "priority",
        "provider",
        "run_page",
        "outcome",
        "text_count",
        "slot",
        "attempts",
        "losses",
        "error_code",
        "queued",
        "dispatched",
        "settled",
    )
    list_filter = (
        ("state", ChoicesDropdownFilter),
        ("priority", ChoicesDropdownFilter),
        ("provider", RelatedDropdownFilter),
        CodeFilter,
    )
    ordering = ("-pk",)
    texts = "texts_shown"
    fields = (
        ("state_label", "priority", "slot", "text_count"),
        ("provider", "generation"),
        ("run_page", "outcome"),
        ("error_code", "error_detail"),
        ("attempts", "losses", "busy_requeues"),
        ("queued", "dispatched", "settled", "expires"),
        ("lease_until", "call_ended", "call_ended_by"),
    )
    readonly_fields = (
        *("state_label", "run_page"),
        *("queued", "dispatched", "settled", "expires", "lease_until", "call_ended"),
    )
    queued = moment_column("queued_at", "queued")
    dispatched = moment_column("dispatched_at", "dispatched")
    settled = moment_column("settled_at", "settled")
    expires = moment_column("expires_at", "expires")
    lease_until = moment_column("lease_expires_at", "lease until")
    call_ended = moment_column("call_ended_at", "call ended")

    def get_queryset(self, request: HttpRequest) -> QuerySet[EmbeddingTask]:
        found: QuerySet[EmbeddingTask] = super().get_queryset(request)
        return found.select_related("provider", "generation", "run", "outcome").defer("texts", "vectors")

    @column("state", label=LABELS, ordering="state")
    def state_label(self, task: EmbeddingTask) -> str:
        return TaskState(task.state).name.lower()

    @column("run")
    def run_page(self, task: EmbeddingTask) -> str:
        return link(task.run, run_facts.short_id(task.run)) if task.run else "interactive"

    @column("texts")
    def texts_shown(self, task: EmbeddingTask) -> str:
        return "\n".join(task.texts or ["the rows' own"])


@admin.register(KnowledgeRow)
class KnowledgeRowAdmin(_TextsForSuperusers):
    empty_hint = "No row yet: sweep a repository."
    paginator = InfinitePaginator
    list_display = ("place", "repository", "lines", "state", "undeliverable_reason", "generation")
    list_filter = (RowStateFilter, RepositoryFilter, ("generation", RelatedDropdownFilter))
    search_fields = ("version__file__path",)
    ordering = ("-pk",)
    actions = ("retry",)
    texts = "text"
    fields = (
        ("repository", "place", "lines"),
        ("state", "undeliverable_reason"),
        ("generation", "task"),
    )
    readonly_fields = ("place", "lines", "state")

    def get_queryset(self, request: HttpRequest) -> QuerySet[KnowledgeRow]:
        found: QuerySet[KnowledgeRow] = super().get_queryset(request)
        has_vector = ExpressionWrapper(Q(vector__isnull=False), output_field=BooleanField())
        related = ("repository__tenant", "version__file", "generation", "task")
        return found.select_related(*related).annotate(has_vector=has_vector).defer("vector", "text")

    @column("path", ordering="version__file__path")
    def place(self, row: KnowledgeRow) -> str:
        return row.version.file.path

    @column("lines")
    def lines(self, row: KnowledgeRow) -> str:
        return f"{row.start_line} to {row.end_line}"

    @column("state", label=LABELS)
    def state(self, row: Any) -> tuple[str, str]:
        if row.undeliverable_reason:
            return "undeliverable", "undeliverable"
        return ("stored", "embedded") if row.has_vector else ("pending", "pending")

    @bulk("Retry the undeliverable rows of these repositories", permission="operate")
    def retry(self, request: HttpRequest, queryset: QuerySet[KnowledgeRow]) -> None:
        repositories = Repository.objects.filter(pk__in=queryset.values("repository"))
        retried = sum(map(store.retry_undeliverable, repositories))
        self.done(request, f"{retried} rows are tried again by the next sweep.")
