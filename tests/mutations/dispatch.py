"""The mutations of the dispatch: who goes next, and what a call that is out holds."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LANE = "tests/embeddings/dispatch/test_lane.py"

DISPATCH_MUTATIONS = (
    Mutation(
        "repositories take turns, whatever their tenants",
        "-",
        "embeddings/dispatch/task_statements.py",
        '    "fair": f"{TENANT_LAST_DISPATCHED} ASC NULLS FIRST, o.last',
        '    "fair": f"o.last',
        (LANE, "-k", "TenantsTakeTurns"),
    ),
)
