"""Paths from an OpenAI client to the benchmarks' chat server: direct, through Sluicegate, through the LiteLLM proxy.

Each path is a context manager that starts its processes as users would: Sluicegate's by the Procfile, the proxy's by its
own command with as many workers as there are cores.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
from honcho.environ import parse_procfile

from benchmarks.sandbox import serving, var_dir
from benchmarks.virtualenvs import bin_of
from embeddings import registry
from embeddings.models import Tenant
from project.local.processes import CHECKOUT, background, within
from tests.support.provider_server import unused_port

LITELLM = "litellm[proxy]==1.108.7"
_READY_S = 120.0
_WARM_STREAMS, _WARM_ROUNDS, _WARM_S = 20, 2, 10
_CLIENT_S = 200.0
_MASTER_KEY = "sk-bench"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ChatPath:
    """The address for clients, and the processes between client and model server."""

    name: str
    base_url: str
    model: str
    key: str
    processes: tuple[psutil.Process, ...] = ()

    def stream(self, streams: int, reader: str, *times: float) -> dict[str, Any]:
        """Reads this many streams at once in a client process; returns what `chat_client` prints."""
        words = [sys.executable, "-m", "benchmarks.chat_client", self.base_url, self.model, str(streams), reader]
        words += map(str, times)
        done = subprocess.run(
            words,
            cwd=CHECKOUT,
            env=os.environ | {"BENCH_CHAT_KEY": self.key},
            capture_output=True,
            check=True,
            timeout=_CLIENT_S,
        )
        return dict(json.loads(done.stdout))

    def usage(self) -> tuple[float, float]:
        """CPU seconds that the processes have used so far, and their unshared memory in megabytes."""
        all_of_them = [each for process in self.processes for each in (process, *process.children(recursive=True))]
        cpu_s = sum(sum(each.cpu_times()[:2]) for each in all_of_them)
        return cpu_s, sum(each.memory_full_info().uss for each in all_of_them) / 1e6


def chat_server(chunks: int, interval: float = 0.0) -> contextlib.AbstractContextManager[str]:
    """The root URL of `benchmarks.chat_server`."""
    return serving("benchmarks.chat_server", "--chunks", str(chunks), "--interval", str(interval))


def straight(server: str) -> contextlib.AbstractContextManager[ChatPath]:
    return contextlib.nullcontext(ChatPath("straight", f"{server}/v1", "bench", "none"))


@contextlib.contextmanager
def sluicegate(server: str) -> Iterator[ChatPath]:
    """The Procfile's web process and chat worker, with a tenant and its key."""
    values = {"kind": "openai-compatible", "base_url": f"{server}/v1", "chat_model": "bench"}
    number = next(_numbers)
    provider = registry.set_provider(f"chat-{number}", values).provider
    _, key = registry.issue_key(Tenant.objects.create(slug=f"chat-{number}", chat_provider=provider))
    port = unused_port()
    with _procfile("web", SLUICEGATE_PORT=str(port)) as web, _procfile("chat") as worker:
        path = ChatPath("Sluicegate", f"http://127.0.0.1:{port}/v1", "bench", key, (web, worker))
        _await_ready(path)
        yield path


@contextlib.contextmanager
def litellm(server: str) -> Iterator[ChatPath]:
    """The LiteLLM proxy in its own virtual environment, with as little logging as it allows."""
    program = bin_of("litellm", [LITELLM]) / "litellm"
    config, port = var_dir() / "litellm.json", unused_port()
    target = {"model": "openai/bench", "api_base": f"{server}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "bench", "litellm_params": target}],
        "general_settings": {"master_key": _MASTER_KEY},
        "litellm_settings": {"num_retries": 0, "telemetry": False},
    }
    config.write_text(json.dumps(settings))
    log = var_dir() / f"litellm-{next(_numbers)}.log"
    words = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environ = os.environ | {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with background([*words, "--num_workers", str(os.cpu_count())], environ, log) as process:
        path = ChatPath("LiteLLM", f"http://127.0.0.1:{port}/v1", "bench", _MASTER_KEY, (psutil.Process(process.pid),))
        _await_ready(path)
        yield path


@contextlib.contextmanager
def _procfile(name: str, **environ: str) -> Iterator[psutil.Process]:
    command = parse_procfile((CHECKOUT / "Procfile").read_text()).processes[name]
    log = var_dir() / f"{name}-{next(_numbers)}.log"
    with background(["sh", "-c", f"exec {command}"], os.environ | environ, log) as process:
        yield psutil.Process(process.pid)


def _await_ready(path: ChatPath) -> None:
    """Waits until many answers at once have come through twice, so that every pool and thread has been created."""
    assert within(lambda: _answers(path), _READY_S), f"{path.name} does not answer"
    deadline = time.monotonic() + _READY_S
    warm = 0
    while warm < _WARM_ROUNDS:
        streams = path.stream(_WARM_STREAMS, "raw", 0, _WARM_S)["streams"]
        warm += all(stream["first_s"] is not None for stream in streams)
        assert time.monotonic() < deadline, f"{path.name} does not stream"


def _answers(path: ChatPath) -> bool:
    request = urllib.request.Request(f"{path.base_url}/models", headers={"Authorization": f"Bearer {path.key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
