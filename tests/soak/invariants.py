"""What must hold after each round, by the rows and by the scripted server's own log. Each check yields its violations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from embeddings.dispatch import task_queue
from embeddings.models import EmbeddingTask, KnowledgeRow, Repository, RepositoryOutcome, RunCircuit, TenantRun
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED, TASK_UNSETTLED
from tests.soak.mischief import PROVIDER, Scene
from tests.support.provider_server import Call, vector_of
from tests.support.sweeps import DIMENSIONS

# A stopped worker's call may last so long after the stop: the deadline of a call, and a busy machine.
AFTER_A_STOP_S = 4.0
# The database stamps a circuit within its transaction; a call that was admitted before may arrive this much later.
CLOCK_SLACK_S = 0.25


def violations(scene: Scene, calls: Sequence[Call]) -> list[str]:
    """Of the rows as they are now, and of these calls of the round."""
    checks = (_cap(scene, calls), _after_circuit(scene, calls), _decided(), _tasks(), _rows(scene))
    return [violation for check in checks for violation in check]


def _within_a_stop(scene: Scene, moment: float) -> bool:
    return any(began <= moment <= ended + AFTER_A_STOP_S for began, ended in scene.stops)


def _cap(scene: Scene, calls: Sequence[Call]) -> Iterator[str]:
    for first, second in pairwise(sorted(calls, key=lambda call: call.arrived_at)):
        overlaps = first.ended_at is None or second.arrived_at < first.ended_at
        if overlaps and not _within_a_stop(scene, second.arrived_at):
            yield f"two calls at once: {_shown(first)} and {_shown(second)}"


def _after_circuit(scene: Scene, calls: Sequence[Call]) -> Iterator[str]:
    """The soak has one run at a time: a call between a circuit's opening and the next run's start is its own run's."""
    to_wall = time.time() - time.monotonic()
    starts = sorted(run.created_at.timestamp() for run in TenantRun.objects.all())
    for circuit in RunCircuit.objects.exclude(opened_at=None):
        opened = circuit.opened_at.timestamp()
        until = min((start for start in starts if start > opened), default=float("inf"))
        for call in calls:
            arrived = call.arrived_at + to_wall
            if opened + CLOCK_SLACK_S < arrived < until and not _within_a_stop(scene, call.arrived_at):
                yield f"run {circuit.run_id}: {_shown(call)} came {arrived - opened:.2f} s after its circuit opened"
        for task in EmbeddingTask.objects.filter(run_id=circuit.run_id, dispatched_at__gt=circuit.opened_at):
            yield f"run {circuit.run_id}: task {task.pk} was dispatched after its circuit opened"


def _decided() -> Iterator[str]:
    for run in TenantRun.objects.filter(status__in=RUN_UNFINISHED):
        yield f"run {run.pk} is {run.status}"
    for outcome in RepositoryOutcome.objects.filter(status__in=OUTCOME_UNFINISHED):
        yield f"outcome {outcome.pk} of run {outcome.run_id} is {outcome.status}"


def _tasks() -> Iterator[str]:
    for task in EmbeddingTask.objects.filter(state__in=TASK_UNSETTLED) | EmbeddingTask.objects.exclude(slot=None):
        yield f"task {task.pk} of run {task.run_id} is {task.get_state_display()} with slot {task.slot}"
    for task in task_queue.stranded_tasks():
        yield f"task {task.pk} is queued for outcome {task.outcome_id}, which is decided"


def _rows(scene: Scene) -> Iterator[str]:
    for repository in Repository.objects.filter(tenant=scene.tenant, removed_at=None):
        source = scene.git[repository.slug].path
        expected = sorted(path.read_text() for path in source.glob("*.txt"))
        model = repository.tenant.embedding_provider.embedding_model
        rows = KnowledgeRow.objects.filter(repository=repository, generation__model=model)
        live = list(rows.filter(version__is_live=True))
        if sorted(row.text for row in live) != expected:
            yield f"repository {repository.slug}: {len(live)} live rows for {len(expected)} texts, or other texts"
        for row in live:
            if row.vector is None or not np.allclose(row.vector, vector_of(row.text, DIMENSIONS), atol=1e-6):
                yield f"row {row.pk} of {repository.slug} (task {row.task_id}) has not the vector of its text"
        for row in rows.filter(vector=None):
            yield f"row {row.pk} of {repository.slug} is pending, bound to task {row.task_id}"


def _shown(call: Call) -> str:
    ended = "open" if call.ended_at is None else f"{call.ended_at:.3f}"
    return f"call {call.number} ({PROVIDER} {call.arrived_at:.3f} to {ended}, {call.ended_by}, {call.texts[:1]})"
