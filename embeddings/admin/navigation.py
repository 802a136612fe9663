"""The admin's side bar: the pages in the order in which they are needed, whichever apps bring them."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse

_SECTIONS = (
    (
        "Set up",
        (
            ("embeddings.Provider", "dns"),
            ("embeddings.Tenant", "groups"),
            ("embeddings.TenantApiKey", "key"),
            ("embeddings.Repository", "folder_data"),
        ),
    ),
    (
        "Sweeps",
        (
            ("embeddings.TenantRun", "sync"),
            ("embeddings.RepositoryOutcome", "fact_check"),
            ("embeddings.EmbeddingTask", "stacks"),
            ("embeddings.KnowledgeRow", "segment"),
        ),
    ),
    (
        "Chat",
        (("streaming.ChatTurn", "chat"), ("streaming.Conversation", "forum"), ("streaming.ChatAttempt", "repeat")),
    ),
    ("Access", (("auth.User", "person"), ("auth.Group", "group"))),
)


def sections(request: HttpRequest) -> list[dict[str, Any]]:
    """Unfold's navigation: every page that is registered and that this user may see."""
    overview = {"title": "Overview", "icon": "monitoring", "link": reverse("admin:index")}
    found = [{"title": title, "items": _items(request, models), "separator": True} for title, models in _SECTIONS]
    return [{"items": [overview]}, *(section for section in found if section["items"])]


def _items(request: HttpRequest, models: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    registered = ((apps.get_model(name), icon) for name, icon in models)
    return [
        {
            "title": model._meta.verbose_name_plural.capitalize(),  # type: ignore[union-attr]  # never unset
            "icon": icon,
            "link": reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"),
        }
        for model, icon in registered
        if admin.site.is_registered(model) and admin.site.get_model_admin(model).has_view_permission(request)
    ]
