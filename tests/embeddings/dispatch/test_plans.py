"""The hot statements read no history: each finds its tasks by a partial index, however many settled ones there are."""

import pytest
from django.db import connection

from embeddings.dispatch import task_queue
from embeddings.dispatch import task_statements as sql
from embeddings.models import EmbeddingTask, RepositoryOutcome, TenantRun
from embeddings.runs import retention
from embeddings.states import TaskState
from tests.support.factories import make_generation, make_outcome, make_provider, make_run, make_task

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]

SETTLED, OUTCOMES = 20_000, 2_000
HOT = {
    name: getattr(sql, name)
    for name in (
        *("EXPIRE", "FREE_ABANDONED_SLOTS", "LOST", "TAKEN_SLOTS", "HAS_WORK", "WANTS_DRAIN", "OVERTAKING"),
        "FAIL_QUEUED",
    )
} | {f"PICK {order}, batch first: {first}": statement for (order, first), statement in sql.PICK.items()}


@pytest.fixture
def history(settings):
    """A provider with a long history and one queued task, known to the planner."""
    provider = make_provider()
    generation = make_generation(provider)
    facts = {"provider": provider, "generation": generation, "state": TaskState.STORED}
    EmbeddingTask.objects.bulk_create(
        [EmbeddingTask(**facts, settled_at="2026-01-01T00:00Z") for _ in range(SETTLED)], batch_size=1_000
    )
    outcome = make_outcome(make_run(provider), status="embedding")
    make_task(outcome)
    ended = {"tenant_slug": outcome.tenant_slug, "repository": outcome.repository, "status": "succeeded"}
    runs = TenantRun.objects.bulk_create([TenantRun(provider=provider, generation=generation) for _ in range(OUTCOMES)])
    RepositoryOutcome.objects.bulk_create(
        [RepositoryOutcome(run=run, last_dispatched_at="2026-01-01T00:00Z", **ended) for run in runs]
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return provider


def plan_of(statement: str, values: dict[str, object]) -> str:
    with connection.cursor() as cursor:
        prefix = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
        sql.execute(cursor, f"{prefix} {statement}", **values)
        return "\n".join(str(row[-1]) for row in cursor.fetchall())


def reads_all(plan: str) -> bool:
    """Whether the plan reads the table of tasks, or of outcomes, from end to end, or all tasks of the provider."""
    lines = [line for line in plan.splitlines() if "Seq Scan" in line or "SCAN" in line or "provider_id_" in line]
    tables = (sql.TASK, "embeddings_repositoryoutcome")
    return any(
        any(table in line for table in tables) or line.split()[1:2] in (["t"], ["l"], ["q"], ["s"], ["o"], ["f"])
        for line in lines
    )


def test_the_hot_statements_read_no_settled_task(history, django_assert_max_num_queries):
    values = {"provider": history.pk, "priority_most": 1, "task": 1, "code": "", "detail": "", "reason": ""}
    plans = {name: plan_of(statement, values) for name, statement in HOT.items()}
    assert {name: plan for name, plan in plans.items() if reads_all(plan)} == {}
    # A tenant's latest dispatch is one entry of an index, not all its outcomes.
    assert "outcome_turn_of_tenant" in plans["PICK fair, batch first: False"], plans
    # The twin: the history is read by a statement that asks for nothing of a partial index.
    assert reads_all(plan_of(f"SELECT id FROM {sql.TASK} WHERE losses < 3", values))  # noqa: S608
    with django_assert_max_num_queries(3):
        assert task_queue.providers_with_work() == [history.pk]
    # The purge finds what is old by its age.
    settled = EmbeddingTask.objects.filter(priority=1, settled_at__lt="2025-01-01T00:00Z", slot=None)
    plan = settled.order_by("settled_at").values_list("pk", flat=True)[:1000].explain()
    assert "task_settled" in plan, plan
    assert retention.purge_tasks("2025-01-01T00:00Z") == 0
