"""`make demo`: runs all of Sluicegate once on real input, with the commands a person would type; leaves nothing running.

It makes two tenants with a git repository each (this checkout, and one made of a few of Django's own modules), sweeps
them through a Celery worker with the real MiniLM model, searches, and lets the real SmolLM2 answer a question. Its data
stays in `var/demo`, so that a second run finds everything unchanged and has nothing to do.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import django

from project.local.model_files import ModelFilesError, models_dir, prepare
from project.local.model_server import DEFAULT_PORT, LocalModelsError, ModelServer
from project.local.processes import CHECKOUT, background, foreground, is_free, local_environment, say, within
from project.runtime.embedded import EmbeddedValkeyError, ensure_valkey

_WORKER_READY_S = 30.0
# Enough to answer the questions; more files would only take longer to embed.
_OWN_FILES = (
    "/README.md",
    "/docs/",
    "/streaming/*.py",
    "/embeddings/*.py",
    "/embeddings/knowledge/",
    "/embeddings/providers/",
)
_DJANGO_MODULES = (
    "contrib/auth/hashers.py",
    "contrib/auth/password_validation.py",
    "contrib/auth/tokens.py",
    "core/cache/backends/locmem.py",
    "core/paginator.py",
    "core/signing.py",
    "core/validators.py",
    "middleware/csrf.py",
    "middleware/gzip.py",
    "utils/crypto.py",
    "utils/dateparse.py",
    "utils/html.py",
    "utils/text.py",
    "utils/timezone.py",
)
_QUESTIONS = (
    ("acme", "what happens to the other repositories when the model server times out"),
    ("acme", "notice that a stream has gone silent and abort the request"),
    ("globex", "how is a password hashed and checked against the stored one"),
)

_CHAT = ("globex", "How does Django check a password against the stored one?")


class DemoError(Exception):
    """The demo cannot go on. The message is one line."""


@dataclass(frozen=True)
class Stage:
    """The demo's VAR_DIR and the environment of its processes."""

    var_dir: Path
    environ: Mapping[str, str]

    def manage(self, *words: str) -> None:
        """Run one `manage.py` command and show its output. Raises DemoError unless it exits with 0."""
        say(f"\n$ manage.py {shlex.join(words)}", bold=True)
        status = foreground([sys.executable, "manage.py", *words], self.environ)
        if status:
            raise DemoError(f"`manage.py {words[0]}` ended with exit status {status}")

    def newest_run(self) -> dict[str, Any]:
        """The report of the newest run."""
        newest = self._ask("runs", "list", "--limit", "1")["runs"][0]
        return self._ask("runs", "show", newest["id"])

    def _ask(self, *words: str) -> dict[str, Any]:
        command = [sys.executable, "manage.py", *words, "--json"]
        run = subprocess.run(command, cwd=CHECKOUT, env=self.environ, stdout=subprocess.PIPE, check=False)
        if run.returncode:
            raise DemoError(f"`manage.py {shlex.join(words)}` ended with exit status {run.returncode}")
        answer: dict[str, Any] = json.loads(run.stdout)
        return answer


def main() -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        play(Path(os.environ.get("SLUICEGATE_DEMO_DIR") or CHECKOUT / "var" / "demo"))
    except (DemoError, EmbeddedValkeyError, LocalModelsError, ModelFilesError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; the next `make demo` continues from here\n")
        return 130
    say(f"\nDone in {time.monotonic() - started:.0f} s; everything is stopped. `make up` serves it all.", bold=True)
    return 0


def play(var_dir: Path) -> None:
    """The whole demo with its state in `var_dir`. Raises one of the errors that `main` prints."""
    _need_commits(CHECKOUT)
    _begin_anew_if_changed(var_dir)
    _make_django_repository(var_dir)
    stage = Stage(var_dir, local_environment(var_dir))
    models = models_dir(CHECKOUT / "var")
    prepare(models, say)
    with ExitStack() as running:
        valkey = running.enter_context(ensure_valkey(var_dir))
        say(f"valkey ready at {valkey.socket_path}")
        server = running.enter_context(ModelServer(models, port=DEFAULT_PORT if is_free(DEFAULT_PORT) else 0))
        say(f"model server ready at {server.base_url} ({server.embedding_model}, {server.chat_model})")
        _set_up(stage, server)
        _start_worker(stage, running)
        _sweep_and_ask(stage)


def _begin_anew_if_changed(var_dir: Path) -> None:
    """Delete the data of another version or place of the demo: its repositories were different."""
    made = var_dir / "made"
    if var_dir.exists() and not (made.exists() and made.read_text() == _signature(var_dir)):
        shutil.rmtree(var_dir)
    var_dir.mkdir(parents=True, exist_ok=True)


def _set_up(stage: Stage, server: ModelServer) -> None:
    stage.manage("migrate", "--verbosity", "0")
    models = ("--embedding-model", server.embedding_model, "--chat-model", server.chat_model)
    stage.manage("provider", "set", "local", "--kind", "openai-compatible", "--base-url", server.base_url, *models)
    made = stage.var_dir / "made"
    if made.exists():
        say("\nthe tenants and repositories exist already")
        return
    for words in _owners(stage.var_dir):
        stage.manage(*words)
    made.write_text(_signature(stage.var_dir))


def _owners(var_dir: Path) -> list[tuple[str, ...]]:
    """The commands that make the tenants and their repositories."""
    providers = ("--embedding-provider", "local", "--chat-provider", "local")
    tenants = [("tenant", "add", tenant, *providers) for tenant in ("acme", "globex")]
    own = [word for pattern in _OWN_FILES for word in ("--include", pattern)]
    return [
        *tenants,
        ("repository", "add", "acme", "sluicegate", str(CHECKOUT), *own),
        ("repository", "add", "globex", "django-parts", str(_django_path(var_dir))),
    ]


def _signature(var_dir: Path) -> str:
    return "".join(f"{shlex.join(words)}\n" for words in _owners(var_dir))


def _start_worker(stage: Stage, running: ExitStack) -> None:
    words = ["-A", "project", "worker", "-P", "threads", "-c", "16", "-Q", "sweeps,embeddings,housekeeping"]
    say(f"\n$ celery {shlex.join(words)} &", bold=True)
    log = stage.var_dir / "worker.log"
    command = [sys.executable, "-m", "celery", *words, "--loglevel", "INFO"]
    worker = running.enter_context(background(command, stage.environ, log))
    ready = within(lambda: b" ready." in log.read_bytes() or worker.poll() is not None, _WORKER_READY_S)
    if not ready or worker.poll() is not None:
        raise DemoError(f"the worker did not start: see {log}")
    say(f"worker ready, its log is {log}")


def _sweep_and_ask(stage: Stage) -> None:
    stage.manage("sweep")
    answered = stage.var_dir / "answered"
    if answered.exists() and stage.newest_run()["provider_calls"] == 0:
        say(
            f"\nUnchanged, and no call to the model server: `rm -r {stage.var_dir}` makes the next demo start from scratch."
        )
        return
    for tenant, question in _QUESTIONS:
        stage.manage("search", tenant, question, "--limit", "2")
    say("\nThe demo's chat model is the smallest there is: it streams and shows its sources, and is no expert.")
    stage.manage("chat", *_CHAT)
    answered.touch()


def _need_commits(checkout: Path) -> None:
    if shutil.which("git") is None:
        raise DemoError("git was not found")
    if subprocess.run([*_git(checkout), "rev-parse", "--quiet", "--verify", "HEAD"], capture_output=True).returncode:
        raise DemoError(
            f"{checkout} is not a git repository with commits: clone the project with git, so that the demo can sweep it"
        )


def _django_path(var_dir: Path) -> Path:
    return var_dir / f"django-{django.get_version()}"


def _make_django_repository(var_dir: Path) -> None:
    """A git repository of some modules of the installed Django, with the same commit id on every machine."""
    repository = _django_path(var_dir)
    if (repository / ".git" / "refs" / "heads" / "main").exists():
        return
    shutil.rmtree(repository, ignore_errors=True)
    for module in _DJANGO_MODULES:
        target = repository / "django" / module
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(django.__file__).parent / module, target)
    commit = ["commit", "--quiet", "--message", f"Some modules of Django {django.get_version()}"]
    fixed = {f"GIT_{role}_{field}": value for role in ("AUTHOR", "COMMITTER") for field, value in _IDENTITY.items()}
    environ = os.environ | fixed | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for words in (["init", "--quiet", "--initial-branch", "main"], ["add", "."], commit):
        run = subprocess.run([*_git(repository), *words], env=environ, capture_output=True, text=True)
        if run.returncode:
            raise DemoError(f"git {words[0]} failed in {repository}: {run.stderr.strip()[-200:]}")


_IDENTITY = {"NAME": "Sluicegate demo", "EMAIL": "demo@localhost", "DATE": "2026-01-01T00:00:00Z"}


def _git(repository: Path) -> list[str]:
    return ["git", "-C", str(repository), "-c", f"safe.directory={repository}"]


if __name__ == "__main__":
    sys.exit(main())
