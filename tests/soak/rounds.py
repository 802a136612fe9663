"""Rounds: a sweep under mischief, watched; then everything is healed, swept until current, and checked."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Max, Sum
from django.utils import timezone

import streaming.tasks
from embeddings import tasks
from embeddings.knowledge.store import retry_undeliverable
from embeddings.models import EmbeddingTask, Provider, RepositoryOutcome, TenantRun
from embeddings.registry import add_tenant, issue_key, match_repositories, set_provider
from embeddings.runs import sweep
from embeddings.runtime.retry import DATABASE_AWAY, retry_on_database_error
from embeddings.states import RUN_UNFINISHED, OutcomeStatus, RunTrigger
from project.runtime.embedded import hold_valkey
from streaming.models import ChatTurn
from streaming.states import TURN_UNFINISHED
from tests.soak import chats, invariants
from tests.soak.chats import Chats
from tests.soak.databases import Database
from tests.soak.mischief import LOSES_TEXT, LOSES_WAKE_UPS, PROVIDER, Mischief, Scene, carry_out, draw
from tests.support.processes import CHECKOUT, LEASES, Worker, process_environ, start_web
from tests.support.provider_server import ProviderServer
from tests.support.sweeps import DIMENSIONS
from tests.support.waiting import eventually

STILL_S = 10.0
WORKERS = 4
CHAT_WORKERS = 2
SWEEP_TIMEOUT_S = 90.0
SWEEPS_TO_HEAL = 6
TURNS_TIMEOUT_S = 30.0


class Violation(Exception):
    """The lines of a report: what was found, and in which round."""


@dataclass
class Soak:
    seconds: float
    seed: int
    say: Callable[[str], None]
    rounds: int = 0
    sweeps: int = 0
    calls: int = 0
    turns: int = 0
    retried: int = 0
    step_ins: Counter[str] = field(default_factory=Counter)
    longest_still_s: float = 0.0

    def run(self, database: Database, folder: Path) -> dict[str, Any]:
        """Rounds until the time is up, one at least. Raises Violation."""
        rng = random.Random(self.seed)
        # A short soak has short rounds.
        window_s, stop_s = (2.0, 2.0) if self.seconds < 120 else (8.0, 20.0)
        began = time.monotonic()
        with _scene(database, folder) as scene:
            while not self.rounds or time.monotonic() - began < self.seconds:
                self.rounds += 1
                drawn = draw(rng, window_s, stop_s)
                self.say(f"round {self.rounds}: {'; '.join(map(str, drawn))}")
                try:
                    self._round(scene, drawn)
                except Violation as found:
                    lines = [f"seed {self.seed}, round {self.rounds}", *map(str, drawn), *found.args]
                    raise Violation(*lines) from found
            return {
                "seed": self.seed,
                "seconds": round(time.monotonic() - began, 1),
                "rounds": self.rounds,
                "sweeps": self.sweeps,
                "calls": self.calls,
                "turns": self.turns,
                "undeliverable_retried": self.retried,
                "mischief": dict(sorted(scene.counts.items())),
                "step_ins": dict(self.step_ins),
                "longest_still_s": round(self.longest_still_s, 1),
            }

    def _round(self, scene: Scene, drawn: list[Mischief]) -> None:
        first_call = len(scene.server.embedding_calls)
        scene.change_all()
        sweep.start(list(match_repositories()), trigger=RunTrigger.COMMAND, concurrency=2)
        self.sweeps += 1
        with ThreadPoolExecutor(len(drawn)) as pool:
            pending = [pool.submit(carry_out, scene, each) for each in drawn]
            self._watch(scene, drawn, pending)
        for done in pending:
            done.result()
        self._heal(scene)
        calls = scene.server.embedding_calls[first_call:]
        self.calls += len(calls)
        found = invariants.violations(scene, calls)
        found += chats.violations(scene.chats.asked, log_was_lost=bool(LOSES_TEXT & {each.kind for each in drawn}))
        if found:
            raise Violation(*found)
        self.turns += len(scene.chats.asked)
        scene.chats.asked.clear()
        scene.stops.clear()

    def _watch(self, scene: Scene, drawn: list[Mischief], pending: list[Future[None]]) -> None:
        """Looks on until every run has finished; nothing may stand still for STILL_S unless a wake-up was destroyed."""
        seen, since = None, time.monotonic()
        while True:
            at_mischief = not all(each.done() for each in pending)
            with suppress(*DATABASE_AWAY):
                present = _progress()
                if not at_mischief and not present["unfinished"]:
                    return
                if present != seen or at_mischief or _provider_is_slow(scene):
                    seen, since = present, time.monotonic()
            still_s = time.monotonic() - since
            self.longest_still_s = max(self.longest_still_s, still_s)
            if still_s > STILL_S:
                destroyers = sorted({each.kind for each in drawn} & LOSES_WAKE_UPS)
                if not destroyers:
                    raise Violation(f"nothing moved for {STILL_S} s: {seen}", *_unfinished_rows())
                self.step_ins.update(destroyers)
                self.say(f"  stepping in as beat would: {seen}")
                hold_valkey(settings.VAR_DIR)
                retry_on_database_error(tasks.go_round)
                since = time.monotonic()
            time.sleep(0.1)
            connection.close_if_unusable_or_obsolete()

    def _heal(self, scene: Scene) -> None:
        """Ends the mischief and sweeps, by the command, until a sweep finds everything unchanged and makes no call.

        A text that the server answered with 500 alone, and no other, is undeliverable: it is retried, as an operator would.
        """
        scene.server.clear_script()
        scene.server.script(chats.answer)
        hold_valkey(settings.VAR_DIR)
        for worker in (*scene.workers, *scene.chat_workers):
            worker.wait_ready()
        eventually(_no_turn_is_unfinished, timeout=TURNS_TIMEOUT_S, message="every turn is decided")
        for repository in match_repositories():
            self.retried += retry_undeliverable(repository)
        for _ in range(SWEEPS_TO_HEAL):
            calls_before = len(scene.server.embedding_calls)
            outcomes = self._sweep()
            if set(outcomes.values()) == {OutcomeStatus.UNCHANGED}:
                if bought := len(scene.server.embedding_calls) - calls_before:
                    raise Violation(f"a sweep over what was current made {bought} calls")
                return
        raise Violation(f"not current after {SWEEPS_TO_HEAL} healed sweeps: {outcomes}", *_unfinished_rows())

    def _sweep(self) -> dict[str, str]:
        """One `manage.py sweep --json`: each repository's outcome."""
        self.sweeps += 1
        command = [sys.executable, "manage.py", "sweep", "--json"]
        environ = process_environ() | LEASES
        try:
            ended = subprocess.run(
                command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=SWEEP_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Violation(f"`manage.py sweep` ran for {SWEEP_TIMEOUT_S} s", *_unfinished_rows()) from error
        try:
            runs = json.loads(ended.stdout)["runs"]
        except ValueError as error:
            raise Violation(f"`manage.py sweep --json` exited {ended.returncode}: {ended.stderr[-2000:]}") from error
        return {each["repository"]: each["status"] for run in runs for each in run["outcomes"]}


@contextmanager
def _scene(database: Database, folder: Path) -> Iterator[Scene]:
    hold_valkey(settings.VAR_DIR)
    with ProviderServer(dimensions=DIMENSIONS, latency=0.05) as server:
        server.script(chats.answer)
        models = {"embedding_model": "embed", "chat_model": "chat"}
        values = {"kind": "openai-compatible", "base_url": server.openai_url} | models
        limits = {"batch_size": 2, "embedding_timeout_ms": 1_000, "query_timeout_ms": 1_000}
        budgets = {"request_timeout_ms": 1_000, "stream_idle_timeout_ms": 1_000}
        provider = set_provider(PROVIDER, values | limits | budgets).provider
        tenant = add_tenant("soak", {"embedding_provider": provider, "chat_provider": provider}).tenant
        web, address = start_web(**LEASES)
        scene = Scene(
            server,
            database,
            tenant,
            folder,
            Chats(address, issue_key(tenant)[1]),
            [Worker("project") for _ in range(WORKERS)],
            [Worker("project", ("chat",)) for _ in range(CHAT_WORKERS)],
        )
        try:
            for _ in range(3):
                scene.add_repository()
            for worker in (*scene.workers, *scene.chat_workers):
                worker.wait_ready()
            yield scene
        finally:
            for process in (web, *scene.workers, *scene.chat_workers):
                if process.returncode is None:
                    process.kill()


def _progress() -> dict[str, Any]:
    """What changes while a run moves."""
    unfinished = list(TenantRun.objects.filter(status__in=RUN_UNFINISHED).values_list("pk", "status"))
    outcomes = RepositoryOutcome.objects.filter(run__in=[pk for pk, _ in unfinished])
    return {
        "unfinished": unfinished,
        "outcomes": sorted(outcomes.values_list("pk", "status")),
        "sums": outcomes.aggregate(Sum("embedded"), Sum("provider_calls"), Sum("scan_losses")),
        "tasks": sorted(EmbeddingTask.objects.filter(settled_at=None).values_list("pk", "state", "attempts", "losses")),
        "last_task": EmbeddingTask.objects.aggregate(Max("pk"), Max("settled_at")),
    }


def _no_turn_is_unfinished() -> bool:
    """Looks as beat would, whose rounds end orphaned turns."""
    with suppress(*DATABASE_AWAY):
        streaming.tasks.go_round()
        return not ChatTurn.objects.filter(state__in=TURN_UNFINISHED).exists()
    connection.close()
    return False


def _provider_is_slow(scene: Scene) -> bool:
    busy = Provider.objects.filter(name=PROVIDER, busy_until__gt=timezone.now()).exists()
    return busy or scene.server.in_flight > 0


def _unfinished_rows() -> Iterator[str]:
    for run in TenantRun.objects.filter(status__in=RUN_UNFINISHED):
        yield f"run {run.pk}: {run.status}, dispatch_allowed {run.dispatch_allowed}, cancel {run.cancel_requested_at}"
        for outcome in run.outcomes.all():
            yield f"  outcome {outcome.pk} {outcome}: {outcome.status} {outcome.error_code}, {outcome.pending} pending"
    for task in EmbeddingTask.objects.filter(settled_at=None).order_by("pk"):
        lease = f"lease until {task.lease_expires_at}, slot {task.slot}, losses {task.losses}"
        yield f"  task {task.pk} of outcome {task.outcome_id}: {task.get_state_display()}, {lease}"
