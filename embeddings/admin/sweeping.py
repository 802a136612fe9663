"""The action "Sweep now" on the pages of repositories and tenants."""

from __future__ import annotations

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join

from embeddings import registry
from embeddings.admin.parts import Page, link
from embeddings.errors import UsageError
from embeddings.models import Repository
from embeddings.reports import run_facts
from embeddings.runs import sweep
from embeddings.states import RunTrigger


def sweep_now(page: Page, request: HttpRequest, repositories: QuerySet[Repository]) -> None:
    """Starts runs over the repositories that can be swept; shows links to the runs, or the reason for none."""
    try:
        chosen = registry.require_sweepable(repositories)
        runs = sweep.start(chosen, trigger=RunTrigger.ADMIN)
    except UsageError as refused:
        page.message_user(request, str(refused), messages.ERROR)
        return
    links = format_html_join(", ", "{}", ((link(run, run_facts.short_id(run)),) for run in runs))
    page.message_user(request, f"Sweeping {len(chosen)} repositories in the background. Runs: " + links)
