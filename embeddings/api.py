"""The endpoints of sweeps and search. A tenant sees, starts and cancels nothing but its own (Guarantees: G12)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import Field

from embeddings.query.search import LIMIT_MAX, QUERY_CHARACTERS_MAX, search
from embeddings.registry import KeyScope
from embeddings.registry.access import TenantKey, caller
from embeddings.reports import tenant_runs
from project.runtime.database_threads import in_database, in_waiting_thread

router = Router()

_RUNS = TenantKey(KeyScope.RUNS)


class StartRun(Schema):
    """Which of the tenant's repositories to sweep; all of them where none is named."""

    repositories: Annotated[list[str], Field(max_length=1000)] = []
    concurrency: Annotated[int, Field(ge=1, le=64)] | None = None


@router.get("/runs", auth=_RUNS, tags=["Sweeps"], summary="Runs")
async def list_runs(request: HttpRequest, limit: Annotated[int, Field(ge=1, le=100)] = 20) -> dict[str, Any]:
    """The tenant's newest runs."""
    return {"runs": await in_database(tenant_runs.newest, caller(request), limit)}


@router.post("/runs", auth=_RUNS, tags=["Sweeps"], response={201: dict[str, Any]}, summary="Start a sweep")
async def start_run(request: HttpRequest, body: StartRun) -> Status[dict[str, Any]]:
    """Starts a sweep; workers do it. A repository that another run is at work on is skipped."""
    started = await in_waiting_thread(tenant_runs.start, caller(request), body.repositories, body.concurrency)
    return Status(201, {"runs": started})


@router.get("/runs/{run_id}", auth=_RUNS, tags=["Sweeps"], summary="Run")
async def show_run(request: HttpRequest, run_id: UUID) -> dict[str, Any]:
    """The tenant's part of a run: its own outcomes, and the circuit's state and code."""
    return await in_database(tenant_runs.show, caller(request), run_id)


@router.post("/runs/{run_id}/cancel", auth=_RUNS, tags=["Sweeps"], summary="Cancel")
async def cancel_run(request: HttpRequest, run_id: UUID) -> dict[str, Any]:
    """Cancels the tenant's own outcomes of the run; those of others go on."""
    return await in_waiting_thread(tenant_runs.cancel, caller(request), run_id)


@router.get("/search", auth=TenantKey(KeyScope.SEARCH), tags=["Search"], summary="Search")
async def search_rows(
    request: HttpRequest,
    q: Annotated[str, Field(min_length=1, max_length=QUERY_CHARACTERS_MAX)],
    limit: Annotated[int, Field(ge=1, le=LIMIT_MAX)] = 5,
) -> dict[str, Any]:
    """The tenant's rows nearest to the words, best first."""
    hits = await in_waiting_thread(search, caller(request), q, limit)
    return {"results": [asdict(hit) for hit in hits]}
