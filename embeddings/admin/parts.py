"""Shared parts of the admin's pages: columns, confirmed actions, read-only pages, forms that check the registry's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import action, display
from unfold.forms import BaseDialogForm
from unfold.utils import display_for_label
from unfold.widgets import UnfoldAdminTextareaWidget

from embeddings.reports.facts import moment

F = TypeVar("F", bound=Callable[..., Any])

LABELS: dict[str, str] = {
    **dict.fromkeys(("succeeded", "unchanged", "completed", "closed", "ready", "stored", "live", "active"), "success"),
    **dict.fromkeys(("queued", "running", "pending", "scanning", "embedding", "dispatched", "answered"), "info"),
    **dict.fromkeys(
        ("deferred", "skipped", "cancelled", "degraded", "paused", "busy", "removed", "revoked"), "warning"
    ),
    **dict.fromkeys(("failed", "interrupted", "open", "undeliverable"), "danger"),
}


def column(
    description: str, *, label: bool | Mapping[str, str] = False, ordering: str | None = None, boolean: bool = False
) -> Callable[[F], F]:
    """A computed column; `label` shows it as a coloured label, also on the row's page and in inlines.

    The value of a label is a status, or a pair: the status that gives the colour, and the text.
    """
    colours = LABELS if label is True else dict(label or {})

    def mark(function: F) -> F:
        @wraps(function)
        def labelled(page: Any, row: Any) -> SafeString:
            value = function(page, row)
            return cast(SafeString, display_for_label(value, "-", colours)) if value else SafeString("-")

        shown = labelled if label else function
        marked: F = display(shown, description=description, ordering=ordering, boolean=boolean or None)
        return marked

    return mark


def moment_column(field: str, description: str) -> Callable[[Any, Any], str]:
    """A column that shows a moment of the row in UTC, to the second."""

    @column(description, ordering=field)
    def shown(page: Any, row: Any) -> str:
        text = moment(getattr(row, field))
        return format_html('<span class="whitespace-nowrap">{}</span>', text) if text else "-"

    return shown


def bulk(description: str, permission: str = "change") -> Callable[[F], F]:
    """An action on the ticked rows of a list."""

    def mark(function: F) -> F:
        marked: F = action(function, description=description, permissions=[permission])
        return marked

    return mark


def confirmed(
    title: str, text: str, *, icon: str, permission: str = "change", form: type[BaseDialogForm] = BaseDialogForm
) -> Callable[[F], F]:
    """A button on a row's page. It asks for confirmation and acts on the POST only: a link from elsewhere does nothing."""
    dialog = {"title": title, "description": text, "form_class": form, "form_submit_text": title}

    def mark(function: F) -> F:
        marked: F = action(function, description=title, icon=icon, permissions=[permission], dialog=dialog)
        return marked

    return mark


class Page(ModelAdmin):  # type: ignore[misc]  # unfold is not typed
    """A list with a page per row; `empty_hint` is shown when there are no rows."""

    empty_hint: ClassVar[str] = ""
    list_before_template = "embeddings/admin/empty_hint.html"
    list_filter_submit = True
    list_fullwidth = True
    list_per_page = 50
    show_full_result_count = False
    compressed_fields = True
    warn_unsaved_form = True

    def offers(self, name: str, row: Any) -> bool:
        """Whether to show this button on this row's page."""
        return True

    def get_actions_detail(self, request: HttpRequest, object_id: int) -> list[Any]:
        offered = super().get_actions_detail(request, object_id)
        row = self.get_object(request, str(object_id)) if offered else None
        return [one for one in offered if row is None or self.offers(one.path, row)]

    def chosen(self, request: HttpRequest, object_id: str) -> Any:
        """The row that a button was pressed for. Raises Http404."""
        found = self.get_object(request, object_id)
        if found is None:
            raise Http404
        return found

    def done(self, request: HttpRequest, text: str, level: int = messages.SUCCESS) -> None:
        self.message_user(request, text, level)

    def back_to(self, request: HttpRequest, row: Model | None = None) -> HttpResponseBase:
        """Redirects to the row's page, or to the list without a row."""
        url = page_url(row) if row else reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        return HttpResponse(headers={"HX-Redirect": url}) if request.headers.get("HX-Request") else redirect(url)


class FactsPage(Page):
    """Read-only rows. Permission to change them is permission to run their actions."""

    actions_on_top = True

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_operate_permission(self, request: HttpRequest, obj: object = None) -> bool:
        allowed: bool = request.user.has_perm(f"{self.opts.app_label}.change_{self.opts.model_name}")
        return allowed


class FactsInline(TabularInline):  # type: ignore[misc]  # unfold is not typed
    """Rows of another model, shown on a page."""

    extra = 0
    can_delete = False
    show_change_link = True
    per_page = 50

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class RulesForm(forms.ModelForm):  # type: ignore[type-arg]  # one form class for several models
    """A form that also checks the registry's rules; `rules` raises ValidationError by field."""

    rules: ClassVar[Callable[[Any], None]]

    def _post_clean(self) -> None:
        super()._post_clean()  # type: ignore[misc]  # Django's own hook, which its stubs leave out
        if self.errors:
            return
        try:
            type(self).rules(self.instance)
        except ValidationError as refused:
            self.add_error(None, refused)


class LinesField(forms.CharField):
    """A list of texts, one a line."""

    widget = UnfoldAdminTextareaWidget({"rows": 4})

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(value) if isinstance(value, list) else value

    def to_python(self, value: Any) -> Any:
        lines = value if isinstance(value, list) else str(value or "").splitlines()
        return [line.strip() for line in lines if line.strip()]

    def has_changed(self, initial: Any, data: Any) -> bool:
        return bool(self.to_python(initial) != self.to_python(data))


def page_url(row: Model) -> str:
    """The address of a row's page."""
    return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=(row.pk,))


def link(row: Model, text: object) -> SafeString:
    """A link to a row's page."""
    return format_html('<a class="text-primary-600 dark:text-primary-500" href="{}">{}</a>', page_url(row), text)
