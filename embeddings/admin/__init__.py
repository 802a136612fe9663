"""The admin: configuration checked by the registry's rules, read-only facts, and the operators' actions on them."""

from django.contrib import admin

from embeddings.admin import accounts, providers, repositories, runs, tenants, work

admin.site.index_title = "Overview"
admin.site.index_template = "embeddings/admin/overview.html"

__all__ = ["accounts", "providers", "repositories", "runs", "tenants", "work"]
