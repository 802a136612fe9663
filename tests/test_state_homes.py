"""Each state has one home: a module that alone writes it (docs/architecture.md, Data and states)."""

import ast

import pytest

from tests.conftest import REPOSITORY_ROOT

WRITERS = ("create", "update", "bulk_create", "bulk_update", "get_or_create", "update_or_create")
STATES = {
    "embeddings/runs/transitions.py": {"status", "dispatch_allowed", "cancel_requested_at", "alive_until"}
    | {"scan_token", "scan_lease_expires_at", "scan_losses"},
    "embeddings/dispatch/task_queue.py": {"slot", "dispatch_token", "lease_expires_at", "settled_at", "state"}
    | {"reused", "embedded", "provider_calls"},
    "embeddings/runs/circuit.py": {"opened_at", "opened_by", "state"},
    "streaming/turns/transitions.py": {"state", "stage", "claim_token", "lease_expires_at", "cancel_requested_at"},
}
# A progress bar's `update(status=...)`.
NO_MODEL = ("embeddings/management/following.py",)
HOMES = {
    column: {home for home, columns in STATES.items() if column in columns} for column in set().union(*STATES.values())
}


def writes_of(text: str) -> set[str]:
    """The state columns that this code's calls of the ORM write."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    written = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in WRITERS]
    return {keyword.arg for call in written for keyword in call.keywords if keyword.arg in HOMES}


@pytest.mark.parametrize("app", ["embeddings", "streaming", "project"])
def test_no_other_module_writes_a_state(app):
    strangers = {}
    for path in sorted((REPOSITORY_ROOT / app).rglob("*.py")):
        name = str(path.relative_to(REPOSITORY_ROOT))
        away = {column for column in writes_of(path.read_text()) if name not in HOMES[column]}
        if away and "/migrations/" not in name and name not in NO_MODEL:
            strangers[name] = away
    assert strangers == {}


@pytest.mark.parametrize("home", STATES)
def test_its_twin_each_home_is_seen_to_write(home):
    assert writes_of((REPOSITORY_ROOT / home).read_text())
