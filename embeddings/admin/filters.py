"""List filters that Django does not provide."""

from __future__ import annotations

from typing import Any

from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.http import HttpRequest
from unfold.contrib.filters.admin import DropdownFilter

from embeddings.knowledge.store import PENDING
from embeddings.models import KnowledgeRow, Repository, RepositoryOutcome, Tenant, TenantRun
from embeddings.states import OutcomeStatus

Choices = list[tuple[str, str]]


class LastOutcomeFilter(DropdownFilter):  # type: ignore[misc]  # unfold is not typed
    """Repositories by the status of their newest outcome."""

    title, parameter_name = "last outcome", "last"

    def lookups(self, request: HttpRequest, model_admin: object) -> Choices:
        return [*OutcomeStatus.choices, ("never", "Never swept")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Repository]) -> QuerySet[Repository]:
        if not self.value():
            return queryset
        if self.value() == "never":
            return queryset.filter(outcomes=None)
        newest = RepositoryOutcome.objects.filter(repository=OuterRef("pk")).order_by("-pk").values("status")[:1]
        return queryset.alias(last_status=Subquery(newest)).filter(last_status=self.value())


class RunTenantFilter(DropdownFilter):  # type: ignore[misc]  # unfold is not typed
    """Runs with a repository of this tenant."""

    title, parameter_name = "tenant", "tenant"

    def lookups(self, request: HttpRequest, model_admin: object) -> Choices:
        return [(slug, slug) for slug in Tenant.objects.order_by("slug").values_list("slug", flat=True)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TenantRun]) -> QuerySet[TenantRun]:
        if not self.value():
            return queryset
        # A subquery: a join would multiply the counts of outcomes.
        return queryset.filter(pk__in=RepositoryOutcome.objects.filter(tenant_slug=self.value()).values("run"))


class OutcomeTenantFilter(RunTenantFilter):
    """Outcomes of this tenant."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(tenant_slug=self.value()) if self.value() else queryset


class CodeFilter(DropdownFilter):  # type: ignore[misc]  # unfold is not typed
    """Rows by error code; offers the codes that occur."""

    title, parameter_name = "error code", "code"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:
        found = model_admin.model.objects.exclude(error_code="").order_by("error_code")
        return [(code, code) for code in found.values_list("error_code", flat=True).distinct()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(error_code=self.value()) if self.value() else queryset


class RowStateFilter(DropdownFilter):  # type: ignore[misc]  # unfold is not typed
    """Knowledge rows by state."""

    title, parameter_name = "state", "state"

    def lookups(self, request: HttpRequest, model_admin: object) -> Choices:
        return [("embedded", "Embedded"), ("pending", "Pending"), ("undeliverable", "Undeliverable")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[KnowledgeRow]) -> QuerySet[KnowledgeRow]:
        states = {"embedded": Q(vector__isnull=False), "pending": PENDING, "undeliverable": ~Q(undeliverable_reason="")}
        return queryset.filter(states[self.value()]) if self.value() in states else queryset


class RepositoryFilter(DropdownFilter):  # type: ignore[misc]  # unfold is not typed
    """Rows of one repository."""

    title, parameter_name = "repository", "repository"

    def lookups(self, request: HttpRequest, model_admin: object) -> Choices:
        found = Repository.objects.filter(removed_at=None).select_related("tenant").order_by("tenant__slug", "slug")
        return [(str(repository.pk), str(repository)) for repository in found]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value() or ""
        return queryset.filter(repository=int(value)) if value.isascii() and value.isdigit() else queryset
