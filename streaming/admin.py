"""Turns and their attempts in the admin: read-only, with the action "Cancel"."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from unfold.contrib.filters.admin import ChoicesDropdownFilter, DropdownFilter, RelatedDropdownFilter
from unfold.forms import BaseDialogForm

from embeddings.admin.filters import CodeFilter
from embeddings.admin.parts import LABELS, FactsInline, FactsPage, bulk, column, confirmed
from streaming.http import turn_requests
from streaming.models import ChatAttempt, ChatTurn
from streaming.states import TURN_UNFINISHED, TurnState

_LABELS = LABELS | {
    **dict.fromkeys(
        ("idle_timeout", "lifetime_exceeded", "provider_error", "protocol_error", "transport_error"), "danger"
    ),
    "truncated": "warning",
}


class EndFilter(DropdownFilter):  # type: ignore[misc]  # unfold is not typed
    """Turns by whether they completed."""

    title, parameter_name = "ended well", "well"

    def lookups(self, request: HttpRequest, model_admin: object) -> list[tuple[str, str]]:
        return [("no", "Everything that was not completed"), ("yes", "Completed"), ("open", "Not ended yet")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[ChatTurn]) -> QuerySet[ChatTurn]:
        ended = queryset.exclude(state__in=TURN_UNFINISHED)
        found: dict[str | None, QuerySet[ChatTurn]] = {
            "no": ended.exclude(state=TurnState.COMPLETED),
            "yes": queryset.filter(state=TurnState.COMPLETED),
            "open": queryset.filter(state__in=TURN_UNFINISHED),
        }
        return found.get(self.value(), queryset)


class AttemptInline(FactsInline):
    model = ChatAttempt
    fields = (
        "number",
        "state",
        "error_kind",
        "transport_code",
        "first_content_ms",
        "longest_gap_ms",
        "chunks",
        "bytes",
        "started_at",
        "ended_at",
    )
    readonly_fields = fields
    verbose_name_plural = "attempts"
    hide_title = True
    show_change_link = False

    @column("ended as", label=_LABELS)
    def state(self, attempt: ChatAttempt) -> str:
        return attempt.end_state


@admin.register(ChatTurn)
class ChatTurnAdmin(FactsPage):
    empty_hint = 'No turn yet: `manage.py chat TENANT "question"`, or any OpenAI client pointed at /v1, makes one.'
    list_display = (
        "short",
        "tenant",
        "model",
        "ended_as",
        "error_code",
        "attempt_count",
        "first_content",
        "tokens",
        "created_at",
        "took",
    )
    list_filter = (
        EndFilter,
        ("state", ChoicesDropdownFilter),
        ("tenant", RelatedDropdownFilter),
        ("provider", RelatedDropdownFilter),
        CodeFilter,
        ("origin", ChoicesDropdownFilter),
    )
    search_fields = ("public_id",)
    ordering = ("-pk",)
    inlines = (AttemptInline,)
    actions = ("cancel",)
    actions_detail = ("cancel_one",)
    fields = (
        ("public_id", "tenant", "provider"),
        ("model", "uses_knowledge", "origin"),
        ("ended_as", "stage"),
        ("error_code", "error_kind", "error_status"),
        "error_detail",
        ("created_at", "started_at", "first_content_at", "ended_at", "cancel_requested_at"),
        "answer",
        "sources",
        "usage",
    )
    readonly_fields = ("public_id", "ended_as", "answer", "created_at")

    def get_queryset(self, request: HttpRequest) -> QuerySet[ChatTurn]:
        found: QuerySet[ChatTurn] = super().get_queryset(request)
        return found.select_related("tenant", "provider").defer("request").annotate(attempts_made=Count("attempts"))

    @column("turn", ordering="pk")
    def short(self, turn: ChatTurn) -> str:
        return str(turn.public_id)[:8]

    @column("state", label=_LABELS, ordering="state")
    def ended_as(self, turn: ChatTurn) -> str:
        return turn.state

    @column("attempts", ordering="attempts_made")
    def attempt_count(self, turn: Any) -> int:
        return int(turn.attempts_made)

    @column("first content, s")
    def first_content(self, turn: ChatTurn) -> str:
        return _seconds(turn.first_content_at, turn.created_at)

    @column("tokens")
    def tokens(self, turn: ChatTurn) -> str:
        return str((turn.usage or {}).get("total_tokens") or "-")

    @column("seconds")
    def took(self, turn: ChatTurn) -> str:
        return _seconds(turn.ended_at, turn.created_at)

    @bulk("Cancel", permission="operate")
    def cancel(self, request: HttpRequest, queryset: QuerySet[ChatTurn]) -> None:
        unfinished = list(queryset.filter(state__in=TURN_UNFINISHED))
        for turn in unfinished:
            turn_requests.cancel(turn)
        self.done(request, f"{len(unfinished)} turns cancelled; the text so far is kept.")

    @confirmed("Cancel", "Ends the turn; the text so far is kept.", icon="cancel", permission="operate")
    def cancel_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        turn = self.chosen(request, object_id)
        if turn.has_ended:
            self.done(request, f"This turn is {turn.state} already.")
        else:
            turn_requests.cancel(turn)
            self.done(request, "Cancelled; the text so far is kept.")
        return self.back_to(request, turn)

    def back_to(self, request: HttpRequest, row: Any = None) -> HttpResponseBase:
        page = ("admin:streaming_chatturn_change", row.pk) if row else ("admin:streaming_chatturn_changelist",)
        url = reverse(page[0], args=page[1:])
        return HttpResponse(headers={"HX-Redirect": url}) if request.headers.get("HX-Request") else redirect(url)

    def has_operate_permission(self, request: HttpRequest, obj: object = None) -> bool:
        allowed: bool = request.user.has_perm("streaming.change_chatturn")
        return allowed


def _seconds(end: Any, start: Any) -> str:
    return f"{(end - start).total_seconds():.1f}" if end and start else "-"
