"""The admin's side bar: the pages of both apps in the order of their use."""

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
            ("embeddings.Provider", "Providers", "dns"),
            ("embeddings.Tenant", "Tenants", "groups"),
            ("embeddings.TenantApiKey", "API keys", "key"),
            ("embeddings.Repository", "Repositories", "folder_data"),
        ),
    ),
    (
        "Sweeps",
        (
            ("embeddings.TenantRun", "Runs", "sync"),
            ("embeddings.RepositoryOutcome", "Outcomes", "fact_check"),
            ("embeddings.EmbeddingTask", "Embedding tasks", "stacks"),
            ("embeddings.KnowledgeRow", "Knowledge rows", "segment"),
        ),
    ),
    (
        "Chat",
        (
            ("streaming.ChatTurn", "Turns", "chat"),
            ("streaming.Conversation", "Conversations", "forum"),
            ("streaming.ChatAttempt", "Attempts", "repeat"),
        ),
    ),
    ("Access", (("auth.User", "Users", "person"), ("auth.Group", "Groups", "group"))),
)


def sections(request: HttpRequest) -> list[dict[str, Any]]:
    """Unfold's navigation callback: the registered pages that this user may see."""
    overview = {"title": "Overview", "icon": "monitoring", "link": reverse("admin:index")}
    found: list[dict[str, Any]] = [{"items": [overview]}]
    for section, pages in _SECTIONS:
        models = ((apps.get_model(name), title, icon) for name, title, icon in pages)
        items = [
            {
                "title": title,
                "icon": icon,
                "link": reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"),
            }
            for model, title, icon in models
            if admin.site.is_registered(model) and admin.site.get_model_admin(model).has_view_permission(request)
        ]
        if items:
            found.append({"title": section, "items": items, "separator": True})
    return found
