"""The soak, briefly, with real workers; and each of its checks sees what it is there for."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from embeddings.models import KnowledgeRow, RepositoryOutcome, RunCircuit, TenantRun
from embeddings.states import CircuitState, OutcomeStatus, RunStatus
from tests.soak import invariants
from tests.soak.mischief import Scene
from tests.support.factories import make_task
from tests.support.processes import CHECKOUT
from tests.support.sweeps import texts

pytestmark = pytest.mark.both_databases

SECONDS = 30
SEED = 11


def test_half_a_minute_of_mischief(tmp_path):
    words = ("--seconds", str(SECONDS), "--database", connection.vendor, "--seed", str(SEED), "--json")
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *words], cwd=CHECKOUT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    summary = json.loads(done.stdout)
    assert summary["rounds"] >= 1
    assert summary["sweeps"] >= 2 * summary["rounds"]
    assert sum(summary["mischief"].values()) >= summary["rounds"]


def two_calls_at_once(calls):
    return [calls[0], replace(calls[1], arrived_at=calls[0].arrived_at)]


def a_call_after_its_circuit_opened(calls):
    opened = timezone.now() - timedelta(minutes=1)
    TenantRun.objects.update(created_at=opened - timedelta(minutes=1))
    RunCircuit.objects.update(state=CircuitState.OPEN, opened_at=opened)
    return calls


def an_outcome_undecided(calls):
    RepositoryOutcome.objects.update(status=OutcomeStatus.EMBEDDING)
    return calls


def a_run_unfinished(calls):
    TenantRun.objects.update(status=RunStatus.RUNNING)
    return calls


def a_task_left(calls):
    make_task(RepositoryOutcome.objects.get())
    return calls


def a_row_lost(calls):
    KnowledgeRow.objects.earliest("pk").delete()
    return calls


def the_vector_of_another_text(calls):
    one, other = KnowledgeRow.objects.order_by("pk")[:2]
    KnowledgeRow.objects.filter(pk=one.pk).update(vector=other.vector)
    return calls


def a_row_pending(calls):
    KnowledgeRow.objects.filter(pk=KnowledgeRow.objects.earliest("pk").pk).update(vector=None)
    return calls


DAMAGES = {
    two_calls_at_once: "two calls at once",
    a_call_after_its_circuit_opened: "after its circuit opened",
    an_outcome_undecided: "is embedding",
    a_run_unfinished: "is running",
    a_task_left: "task",
    a_row_lost: "or other texts",
    the_vector_of_another_text: "has not the vector",
    a_row_pending: "is pending",
}


@pytest.mark.parametrize(("damage", "told"), DAMAGES.items(), ids=[damage.__name__ for damage in DAMAGES])
def test_twin_each_check_sees_its_violation(stage, damage, told):
    stage.swept(stage.repository("a", *texts("alpha", 8)))
    calls = stage.server.embedding_calls
    scene = Scene(stage.server, None, stage.tenant, stage.folder, None, [], [], git=stage.git)
    assert invariants.violations(scene, calls) == []
    assert told in "\n".join(invariants.violations(scene, damage(calls)))
