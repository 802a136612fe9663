"""The admin: configuration under the registry's rules, facts to read, and the few things an operator does to them."""

from django.contrib import admin

from embeddings.admin import accounts, providers, repositories, runs, tenants, work

admin.site.index_title = "Overview"
admin.site.index_template = "embeddings/admin/overview.html"

__all__ = ["accounts", "providers", "repositories", "runs", "tenants", "work"]
