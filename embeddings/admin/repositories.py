"""Repositories: their configuration, last outcome and next sweep."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from unfold.contrib.filters.admin import BooleanRadioFilter, RelatedDropdownFilter
from unfold.forms import BaseDialogForm

from embeddings import registry
from embeddings.admin.filters import LastOutcomeFilter
from embeddings.admin.parts import LABELS, LinesField, Page, RulesForm, bulk, column, confirmed, moment_column
from embeddings.admin.sweeping import sweep_now
from embeddings.knowledge import store
from embeddings.models import Repository
from embeddings.reports import facts


class RepositoryForm(RulesForm):
    rules = registry.clean_repository
    include = LinesField(required=False, help_text="Take only files that match one of these .gitignore patterns.")
    exclude = LinesField(required=False, help_text="Leave out files that match one of these .gitignore patterns.")

    class Meta:
        model = Repository
        fields = ("tenant", "slug", "source", "ref", "include", "exclude", "enabled", "cadence_minutes")


@admin.register(Repository)
class RepositoryAdmin(Page):
    form = RepositoryForm
    empty_hint = "Add a git repository to a tenant: a path on this machine, or an https or ssh URL."
    list_display = (
        "name",
        "last_outcome",
        "reason",
        "rows",
        "pending",
        "undeliverable",
        "failures",
        "next_due",
        "enabled",
        "source",
    )
    list_filter = (
        LastOutcomeFilter,
        ("tenant", RelatedDropdownFilter),
        ("tenant__embedding_provider", RelatedDropdownFilter),
        ("enabled", BooleanRadioFilter),
    )
    search_fields = ("slug", "tenant__slug", "source")
    ordering = ("tenant__slug", "slug")
    actions = ("sweep", "retry_undeliverable")
    actions_detail = ("sweep_one", "retry_one", "remove")
    readonly_fields = ("last_outcome", "reason", "indexed_revision", "failures", "next_due")
    fieldsets = (
        (
            None,
            {"fields": (("tenant", "slug"), "source", "ref", ("include", "exclude"), ("enabled", "cadence_minutes"))},
        ),
        ("Now", {"fields": (("last_outcome", "reason"), ("indexed_revision", "failures"), "next_due")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Repository]:
        return facts.with_last_outcome(Repository.objects.filter(removed_at=None))

    def get_readonly_fields(self, request: HttpRequest, obj: Repository | None = None) -> tuple[str, ...]:
        return (*self.readonly_fields, "tenant", "slug") if obj else self.readonly_fields

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Repository, form: Any, change: bool) -> None:
        registry.save_repository(obj, form.changed_data)
        for note in registry.repository_notes(obj):
            self.done(request, note, messages.WARNING)

    next_due = moment_column("next_due_at", "next due")

    @column("failures in a row", ordering="consecutive_failures")
    def failures(self, repository: Repository) -> int:
        return repository.consecutive_failures

    @column("repository", ordering="slug")
    def name(self, repository: Repository) -> str:
        return str(repository)

    @column("last outcome", label=LABELS)
    def last_outcome(self, repository: Any) -> str:
        return _last(repository).get("status") or "never swept"

    @column("reason")
    def reason(self, repository: Any) -> str:
        return _last(repository).get("error_code") or "-"

    @column("rows")
    def rows(self, repository: Any) -> int:
        return int(_last(repository).get("rows", 0))

    @column("pending")
    def pending(self, repository: Any) -> int:
        return int(_last(repository).get("pending", 0))

    @column("undeliverable")
    def undeliverable(self, repository: Any) -> int:
        return int(_last(repository).get("undeliverable", 0))

    @bulk("Sweep now")
    def sweep(self, request: HttpRequest, queryset: QuerySet[Repository]) -> None:
        sweep_now(self, request, queryset)

    @bulk("Retry undeliverable rows")
    def retry_undeliverable(self, request: HttpRequest, queryset: QuerySet[Repository]) -> None:
        retried = sum(map(store.retry_undeliverable, queryset))
        self.done(request, f"{retried} rows are tried again by the next sweep.")

    @confirmed("Sweep now", "A run over this repository alone.", icon="sync")
    def sweep_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        repository = self.chosen(request, object_id)
        sweep_now(self, request, Repository.objects.filter(pk=repository.pk))
        return self.back_to(request, repository)

    @confirmed("Retry undeliverable rows", "The next sweep sends their texts once more.", icon="replay")
    def retry_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        repository = self.chosen(request, object_id)
        self.done(request, f"{store.retry_undeliverable(repository)} rows are tried again by the next sweep.")
        return self.back_to(request, repository)

    @confirmed(
        "Remove",
        "Hides its rows from search immediately and cancels its unfinished work. A purge deletes the rows.",
        icon="delete",
    )
    def remove(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        repository = self.chosen(request, object_id)
        registry.remove_repository(repository)
        self.done(request, f"Repository {repository} removed.")
        return self.back_to(request)


def _last(repository: Any) -> dict[str, Any]:
    """The facts of the newest outcome; empty on the page that adds a repository."""
    return getattr(repository, "last", None) or {}
