"""Providers: their configuration, state and embedding models; pause and resume."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from unfold.contrib.filters.admin import BooleanRadioFilter, ChoicesRadioFilter
from unfold.forms import BaseDialogForm

from embeddings import registry
from embeddings.admin.parts import LABELS, FactsInline, Page, RulesForm, bulk, column, confirmed, moment_column
from embeddings.models import EmbeddingGeneration, Provider
from embeddings.reports import facts


class ProviderForm(RulesForm):
    rules = registry.clean_provider

    class Meta:
        model = Provider
        exclude = ("is_paused",)


class GenerationInline(FactsInline):
    model = EmbeddingGeneration
    fields = ("model", "dimensions", "created_at")
    readonly_fields = fields
    verbose_name_plural = "embedding models so far, with the dimension learned from each"
    ordering = ("-pk",)
    show_change_link = False


@admin.register(Provider)
class ProviderAdmin(Page):
    form = ProviderForm
    inlines = (GenerationInline,)
    empty_hint = "Add the model server that embeds your repositories: its URL and the name of its embedding model."
    list_display = (
        "name",
        "kind",
        "base_url",
        "embedding_model",
        "dimensions",
        "chat_model",
        "admission",
        "work",
        "state",
    )
    list_filter = (("kind", ChoicesRadioFilter), ("is_paused", BooleanRadioFilter))
    list_filter_submit = True
    search_fields = ("name", "base_url", "embedding_model", "chat_model")
    actions = ("pause", "resume")
    actions_detail = ("pause_one", "resume_one")
    readonly_fields = ("state", "work", "admission", "dimensions", "created")
    fieldsets = (
        (None, {"fields": (("name", "kind"), "base_url", ("embedding_model", "chat_model"), "api_key_env")}),
        ("Now", {"fields": (("state", "work"), ("admission", "dimensions"), "created")}),
        (
            "Embedding",
            {
                "classes": ("tab",),
                "fields": (
                    ("batch_size", "batch_characters"),
                    ("chunk_characters", "chunk_tokens"),
                    ("embedding_timeout_ms", "query_timeout_ms"),
                    "max_in_flight",
                ),
            },
        ),
        (
            "Chat",
            {
                "classes": ("tab",),
                "description": "In milliseconds. An unset budget takes the idle budget's value; 0 or less disables.",
                "fields": (
                    ("request_timeout_ms", "stream_idle_timeout_ms"),
                    ("stream_first_content_timeout_ms", "stream_keepalive_timeout_ms"),
                    ("stream_lifetime_ms", "turn_wall_ms"),
                    "accepts_missing_finish",
                ),
            },
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Provider]:
        return facts.providers()

    def save_model(self, request: HttpRequest, obj: Provider, form: Any, change: bool) -> None:
        for note in registry.notes_on(obj, form.changed_data if change else ()):
            self.done(request, note, messages.WARNING)
        if retried := registry.save_provider(obj, form.changed_data):
            self.done(request, f"{retried} undeliverable rows are tried again by the next sweep.")

    created = moment_column("created_at", "created")

    def offers(self, name: str, row: Provider) -> bool:
        return row.is_paused == (name == "resume_one")

    @column("state", label=LABELS)
    def state(self, provider: Any) -> tuple[str, str]:
        text = facts.provider_state(provider)
        return text.split()[0], text

    @column("work")
    def work(self, provider: Any) -> str:
        return f"{getattr(provider, 'queued', 0)} queued, {getattr(provider, 'dispatched', 0)} at the provider"

    @column("admission")
    def admission(self, provider: Any) -> str:
        return facts.admission(provider)

    @column("dimensions")
    def dimensions(self, provider: Any) -> str:
        return str(getattr(provider, "dimensions", None) or "not learned yet")

    @bulk("Pause: dispatch nothing more")
    def pause(self, request: HttpRequest, queryset: QuerySet[Provider]) -> None:
        self.done(request, f"{sum(map(registry.pause_provider, queryset))} providers paused.")

    @bulk("Resume")
    def resume(self, request: HttpRequest, queryset: QuerySet[Provider]) -> None:
        self.done(request, f"{sum(map(registry.resume_provider, queryset))} providers resumed.")

    @confirmed("Pause", "Stops dispatching to this provider; running calls end by themselves.", icon="pause")
    def pause_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        provider = self.chosen(request, object_id)
        self.done(request, "Paused." if registry.pause_provider(provider) else "It was paused already.")
        return self.back_to(request, provider)

    @confirmed("Resume", "Resumes dispatching to this provider.", icon="play_arrow")
    def resume_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        provider = self.chosen(request, object_id)
        self.done(request, "Resumed." if registry.resume_provider(provider) else "It was not paused.")
        return self.back_to(request, provider)
