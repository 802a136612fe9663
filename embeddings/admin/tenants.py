"""Tenants and their API keys."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from unfold.contrib.filters.admin import BooleanRadioFilter, RelatedDropdownFilter
from unfold.forms import BaseDialogForm
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget, UnfoldAdminTextInputWidget

from embeddings import registry
from embeddings.admin.parts import (
    LABELS,
    FactsInline,
    FactsPage,
    Page,
    RulesForm,
    bulk,
    column,
    confirmed,
    moment_column,
)
from embeddings.admin.sweeping import sweep_now
from embeddings.errors import UsageError
from embeddings.models import Repository, Tenant, TenantApiKey
from embeddings.reports import facts


class TenantForm(RulesForm):
    rules = registry.clean_tenant

    class Meta:
        model = Tenant
        fields = ("slug", "name", "embedding_provider", "chat_provider", "is_active")


class IssueKeyForm(BaseDialogForm):  # type: ignore[misc]  # unfold is not typed
    label = forms.CharField(
        max_length=100, required=False, widget=UnfoldAdminTextInputWidget, help_text="The purpose of the key."
    )
    scopes = forms.MultipleChoiceField(
        choices=registry.KeyScope.choices,
        initial=registry.KeyScope.values,
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text="The endpoints that the key may use.",
    )


class KeyInline(FactsInline):
    model = TenantApiKey
    fields = ("prefix", "label", "scopes", "created", "last_used", "revoked")
    readonly_fields = fields
    ordering = ("-pk",)
    created = moment_column("created_at", "issued")
    last_used = moment_column("last_used_at", "last used")
    revoked = moment_column("revoked_at", "revoked")


class RepositoryInline(FactsInline):
    model = Repository
    fields = ("slug", "source", "ref", "enabled", "indexed_revision", "next_due")
    readonly_fields = fields
    next_due = moment_column("next_due_at", "next due")
    ordering = ("slug",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Repository]:
        found: QuerySet[Repository] = super().get_queryset(request).filter(removed_at=None)
        return found


@admin.register(Tenant)
class TenantAdmin(Page):
    form = TenantForm
    empty_hint = "Add a tenant: the owner of repositories, with the provider that embeds them."
    list_display = ("slug", "name", "embedding_provider", "chat_provider", "repositories", "keys", "state")
    list_filter = (
        ("is_active", BooleanRadioFilter),
        ("embedding_provider", RelatedDropdownFilter),
        ("chat_provider", RelatedDropdownFilter),
    )
    search_fields = ("slug", "name")
    actions = ("sweep",)
    actions_detail = ("sweep_one", "issue_key", "remove")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tenant]:
        return facts.tenants()

    def get_inlines(self, request: HttpRequest, obj: Tenant | None) -> list[type[FactsInline]]:
        return [RepositoryInline, KeyInline] if obj else []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Tenant, form: Any, change: bool) -> None:
        registry.save_tenant(obj, form.changed_data)

    @column("repositories")
    def repositories(self, tenant: Any) -> int:
        return tenant.repository_count or 0

    @column("keys")
    def keys(self, tenant: Any) -> int:
        return tenant.key_count or 0

    @column("state", label=LABELS)
    def state(self, tenant: Tenant) -> str:
        return "active" if tenant.is_active else "removed"

    @bulk("Sweep now")
    def sweep(self, request: HttpRequest, queryset: QuerySet[Tenant]) -> None:
        sweep_now(self, request, Repository.objects.filter(tenant__in=queryset.values("pk")))

    @confirmed("Sweep now", "All repositories of this tenant that are enabled.", icon="sync")
    def sweep_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        tenant = self.chosen(request, object_id)
        sweep_now(self, request, Repository.objects.filter(tenant=tenant))
        return self.back_to(request, tenant)

    @confirmed("Issue key", "A key for the endpoints.", icon="key", form=IssueKeyForm)
    def issue_key(self, request: HttpRequest, form: IssueKeyForm, object_id: str) -> HttpResponseBase:
        tenant, given = self.chosen(request, object_id), form.cleaned_data
        try:
            _, key = registry.issue_key(tenant, label=given["label"], scopes=given["scopes"])
        except UsageError as refused:
            self.done(request, str(refused), messages.ERROR)
            return self.back_to(request, tenant)
        # Rendered directly: a message would put the key into a cookie.
        return render(request, "embeddings/admin/key_issued.html", {"key": key, "tenant": tenant})

    @confirmed(
        "Remove",
        "Revokes its keys, hides its rows from search immediately and cancels its unfinished work. A purge deletes the rows.",
        icon="delete",
    )
    def remove(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        tenant = self.chosen(request, object_id)
        self.done(request, f"Tenant {tenant} removed, with {registry.remove_tenant(tenant)} repositories.")
        return self.back_to(request)


@admin.register(TenantApiKey)
class TenantApiKeyAdmin(FactsPage):
    empty_hint = "No key yet. A tenant's page has the button that issues one."
    list_display = ("prefix", "tenant", "label", "scopes", "created", "last_used", "state")
    list_select_related = ("tenant",)
    list_filter = (("tenant", RelatedDropdownFilter),)
    search_fields = ("prefix", "label", "tenant__slug")
    fields = ("prefix", "tenant", "label", "scopes", "created", "last_used", "revoked")
    readonly_fields = ("created", "last_used", "revoked")
    ordering = ("-pk",)
    actions = ("revoke",)
    actions_detail = ("revoke_one",)
    created = moment_column("created_at", "issued")
    last_used = moment_column("last_used_at", "last used")
    revoked = moment_column("revoked_at", "revoked")

    def offers(self, name: str, row: TenantApiKey) -> bool:
        return row.revoked_at is None

    @column("state", label=LABELS)
    def state(self, key: TenantApiKey) -> str:
        return "revoked" if key.revoked_at else "active"

    @bulk("Revoke", permission="operate")
    def revoke(self, request: HttpRequest, queryset: QuerySet[TenantApiKey]) -> None:
        self.done(request, f"{sum(map(registry.revoke_key, queryset))} keys revoked.")

    @confirmed("Revoke", "The key stops working immediately.", icon="key_off", permission="operate")
    def revoke_one(self, request: HttpRequest, form: BaseDialogForm, object_id: str) -> HttpResponseBase:
        key = self.chosen(request, object_id)
        self.done(request, "Revoked." if registry.revoke_key(key) else "It was revoked already.")
        return self.back_to(request, key)
