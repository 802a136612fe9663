"""The mutations of the dispatch: who goes next, and what a call that is out holds."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BULKHEADS = "embeddings/runtime/bulkheads.py"
NEIGHBOURS = "tests/guarantees/test_neighbours.py"
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
    Mutation(
        "Celery's pool does the work itself",
        "-",
        BULKHEADS,
        "        self.put(begin)\n",
        "        self._do(begin)\n",
        (NEIGHBOURS, "-k", "beats and holds"),
    ),
    Mutation(
        "wake-ups of the same work pile up",
        "-",
        BULKHEADS,
        "            if key in self._waiting:\n                return\n",
        "",
        ("tests/embeddings/runtime/test_bulkheads.py", "-k", "waits_once"),
    ),
    Mutation(
        "a call that is out holds its thread",
        "-",
        "embeddings/tasks.py",
        "    pieces.begin()\n",
        "    pieces.begin()\n    pieces.ended.result()\n",
        (NEIGHBOURS, "-k", "healthy and holds"),
    ),
    Mutation(
        "a cancel does not reach a call that holds no thread",
        "-",
        "embeddings/dispatch/waits.py",
        '            on.wake("cancelled", partial(self._break_off_removed, outs))\n',
        "            del on, outs\n",
        (NEIGHBOURS, "-k", "broken_off"),
    ),
    Mutation(
        "a bulkhead that ends leaves its connections open",
        "-",
        BULKHEADS,
        "            connection.close()\n",
        "            pass\n",
        ("tests/embeddings/runtime/test_bulkheads.py", "-k", "kept_connection"),
    ),
)
