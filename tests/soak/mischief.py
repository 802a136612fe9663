"""The mischief: each kind is drawn from the seed beforehand, and carried out in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from django.conf import settings
from django.db import connection

from embeddings.models import Repository, RepositoryOutcome, Tenant, TenantRun
from embeddings.registry import add_repository, remove_repository, set_provider
from embeddings.runs import sweep
from embeddings.runtime import valkey
from embeddings.runtime.retry import retry_on_database_error
from embeddings.states import OUTCOME_UNFINISHED, RUN_UNFINISHED
from project.runtime.embedded import hold_valkey
from tests.soak.chats import Chats
from tests.soak.databases import Database
from tests.support.git_repositories import GitRepository
from tests.support.processes import Worker
from tests.support.provider_server import Call, ProviderServer, dropped, hang, reset, status, vectors
from tests.support.provider_server.chat_stream import R, T, rst, silence_forever, sse

PROVIDER = "soak"
FILES = 24
# In how many of the rounds people chat: most mischief befalls chats too.
CHAT_SHARE = 0.75


@dataclass(frozen=True)
class Mischief:
    """One piece: after `at` seconds, for `seconds`; `pick`, from 0 to 1, chooses what it befalls."""

    kind: str
    at: float
    seconds: float
    pick: float

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.2f} s for {self.seconds:.2f} s (pick {self.pick:.3f})"


@dataclass
class Scene:
    """What the mischief befalls. `stops` holds the spans (monotonic seconds) in which a worker stood stopped."""

    server: ProviderServer
    database: Database
    tenant: Tenant
    folder: Path
    chats: Chats
    workers: list[Worker]
    chat_workers: list[Worker]
    git: dict[str, GitRepository] = field(default_factory=dict)
    stops: list[tuple[float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _commits: int = 0

    def add_repository(self) -> None:
        """A new repository of FILES files, each of one row."""
        with self.lock:
            self._commits += 1
            slug = f"repository-{self._commits}"
            source = GitRepository(self.folder / slug)
            source.commit({f"{number:03d}.txt": f"{slug} {number}" for number in range(FILES)})
            self.git[slug] = source
        retry_on_database_error(partial(add_repository, self.tenant, slug, str(source.path), {}))

    def change_repository(self, pick: float) -> None:
        """New texts for half of one repository's files."""
        with self.lock:
            self._change(sorted(self.git)[int(pick * len(self.git))], FILES // 2)

    def change_all(self) -> None:
        """New texts for every file, so that the round's sweep has work for as long as the mischief lasts."""
        with self.lock:
            for slug in self.git:
                self._change(slug, FILES)

    def _change(self, slug: str, files: int) -> None:
        self._commits += 1
        self.git[slug].commit({f"{number:03d}.txt": f"change {self._commits} {number}" for number in range(files)})

    def remove_repository(self, pick: float) -> None:
        with self.lock:
            slugs = sorted(self.git)
            if len(slugs) < 3:
                return
            slug = slugs[int(pick * len(slugs))]
            del self.git[slug]
        mine = Repository.objects.filter(tenant=self.tenant, slug=slug)
        repository = retry_on_database_error(mine.get)
        retry_on_database_error(partial(remove_repository, repository))


def draw(rng: random.Random, window_s: float, stop_s: float) -> list[Mischief]:
    """One to four pieces, beside chat turns in most rounds, which start within `window_s` and last `stop_s` at most."""
    kinds = ["chat turns"] * (rng.random() < CHAT_SHARE)
    kinds += rng.sample(sorted(KINDS.keys() - {"chat turns"}), rng.randint(1, 4))
    return [Mischief(kind, rng.uniform(0, window_s), rng.uniform(0.2, stop_s), rng.random()) for kind in kinds]


def carry_out(scene: Scene, mischief: Mischief) -> None:
    time.sleep(mischief.at)
    scene.counts[mischief.kind] += 1
    try:
        KINDS[mischief.kind](scene, mischief)
    finally:
        connection.close()


# --- workers, Valkey, the database ------------------------------------------------------------------------------------
def _kill_worker(scene: Scene, mischief: Mischief) -> None:
    with scene.lock:
        at = int(mischief.pick * len(scene.workers))
        scene.workers[at].kill()
        scene.workers[at] = Worker("project")


def _kill_chat_worker(scene: Scene, mischief: Mischief) -> None:
    with scene.lock:
        at = int(mischief.pick * len(scene.chat_workers))
        scene.chat_workers[at].kill()
        scene.chat_workers[at] = Worker("project", ("chat",))


def _stop_worker(scene: Scene, mischief: Mischief) -> None:
    with scene.lock:
        worker = scene.workers[int(mischief.pick * len(scene.workers))]
        if worker.returncode is not None:
            return
        worker.pause()
    began = time.monotonic()
    time.sleep(mischief.seconds)
    with scene.lock:
        scene.stops.append((began, time.monotonic()))
        if worker.returncode is None:
            worker.resume()


def _database_away(scene: Scene, mischief: Mischief) -> None:
    scene.database.away(min(mischief.seconds, 5.0))


@contextlib.contextmanager
def _valkey_process() -> Iterator[int | None]:
    """The server's process id, or None while it is away."""
    pid = None
    with contextlib.suppress(*valkey.UNREACHABLE):
        pid = int(valkey.client().info("server")["process_id"])
    with contextlib.suppress(ProcessLookupError):
        yield pid


def _kill_valkey(scene: Scene, mischief: Mischief) -> None:
    with _valkey_process() as pid:
        if pid:
            os.kill(pid, signal.SIGKILL)
    hold_valkey(settings.VAR_DIR)


def _freeze_valkey(scene: Scene, mischief: Mischief) -> None:
    with _valkey_process() as pid:
        if pid:
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(min(mischief.seconds, 8.0))
            finally:
                os.kill(pid, signal.SIGCONT)


# --- the model server -------------------------------------------------------------------------------------------------
def _provider_hang(scene: Scene, mischief: Mischief) -> None:
    scene.server.when(lambda call: call.kind == "embedding", hang(), times=1)


def _provider_401(scene: Scene, mischief: Mischief) -> None:
    scene.server.when(lambda call: call.kind == "embedding", status(401), times=1)


def _provider_429(scene: Scene, mischief: Mischief) -> None:
    busy = status(429, headers={"Retry-After": "1"})
    scene.server.when(lambda call: call.kind == "embedding", busy, times=1 + int(2 * mischief.pick))


def _provider_500(scene: Scene, mischief: Mischief) -> None:
    scene.server.when(lambda call: call.kind == "embedding", status(500), times=1 + int(3 * mischief.pick))


def _provider_reset(scene: Scene, mischief: Mischief) -> None:
    scene.server.when(lambda call: call.kind == "embedding", reset(), times=1 + int(3 * mischief.pick))


def _provider_short_reply(scene: Scene, mischief: Mischief) -> None:
    scene.server.when(lambda call: len(call.texts) > 1, vectors(dropped(0)), times=1 + int(2 * mischief.pick))


def _chat_falls_silent(scene: Scene, mischief: Mischief) -> None:
    """Before the first word, or after some."""
    words = [T("silent.0 ")] if mischief.pick < 0.5 else []
    scene.server.when(_is_chat, sse(R, *words, silence_forever()), times=1 + int(3 * mischief.pick))


def _chat_breaks_off(scene: Scene, mischief: Mischief) -> None:
    words = [T("broken.0 ")] if mischief.pick < 0.5 else []
    scene.server.when(_is_chat, sse(R, *words, rst()), times=1 + int(3 * mischief.pick))


def _is_chat(call: Call) -> bool:
    return call.kind == "chat"


# --- what people do ---------------------------------------------------------------------------------------------------
def _cancel_run(scene: Scene, mischief: Mischief) -> None:
    for run in retry_on_database_error(lambda: list(TenantRun.objects.filter(status__in=RUN_UNFINISHED))):
        retry_on_database_error(partial(sweep.request_cancel, run))


def _cancel_outcome(scene: Scene, mischief: Mischief) -> None:
    unfinished = RepositoryOutcome.objects.filter(status__in=OUTCOME_UNFINISHED).select_related("run", "repository")
    if found := retry_on_database_error(lambda: list(unfinished)):
        retry_on_database_error(partial(sweep.cancel_outcome, found[int(mischief.pick * len(found))]))


def _chat(scene: Scene, mischief: Mischief) -> None:
    """Three clients, each with one turn after another."""
    seconds = min(mischief.seconds, 8.0)
    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(scene.chats.ask_for, seconds, mischief.pick + number) for number in range(3)]
    for each in asking:
        each.result()


def _change_model(scene: Scene, mischief: Mischief) -> None:
    values = {"embedding_model": f"embed-{mischief.pick:.6f}"}
    retry_on_database_error(partial(set_provider, PROVIDER, values))


KINDS: dict[str, Callable[[Scene, Mischief], None]] = {
    "worker killed": _kill_worker,
    "worker stopped": _stop_worker,
    "database away": _database_away,
    "Valkey killed": _kill_valkey,
    "Valkey frozen": _freeze_valkey,
    "provider hangs": _provider_hang,
    "provider 401": _provider_401,
    "provider 429": _provider_429,
    "provider 500": _provider_500,
    "provider resets": _provider_reset,
    "provider short reply": _provider_short_reply,
    "run cancelled": _cancel_run,
    "outcome cancelled": _cancel_outcome,
    "model changed": _change_model,
    "chat turns": _chat,
    "chat worker killed": _kill_chat_worker,
    "chat falls silent": _chat_falls_silent,
    "chat breaks off": _chat_breaks_off,
    "repository changed": lambda scene, mischief: scene.change_repository(mischief.pick),
    "repository added": lambda scene, mischief: scene.add_repository(),
    "repository removed": lambda scene, mischief: scene.remove_repository(mischief.pick),
}
# A wake-up may be lost with the process that held it, or while it could not be sent: beat or a follower steps in.
LOSES_WAKE_UPS = {"worker killed", "worker stopped", "database away", "Valkey killed", "Valkey frozen"}
# The event log holds a turn's text until its worker has stored it.
LOSES_TEXT = {"Valkey killed", "Valkey frozen"}
