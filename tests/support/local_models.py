"""The real local models: a server for the tests of one module, and a server that is held while it loads its model."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import pytest

from project.local import model_files
from project.local.model_server import ModelServer
from project.local.processes import CHECKOUT
from tests.support.provider_server import unused_port
from tests.support.waiting import eventually

MODELS = model_files.models_dir(CHECKOUT / "var")


@pytest.fixture(scope="module")
def local_server() -> Iterator[ModelServer]:
    model_files.prepare(MODELS, lambda line: None)
    with ModelServer(MODELS) as running:
        yield running


_PROGRAM = """
import sys
from xllamacpp import CommonParams, Server
params = CommonParams()
params.model.path = sys.argv[1]
params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[2])
params.n_parallel, params.n_ctx, params.n_predict = 1, 512, 8
params.warmup, params.verbosity = False, 1
server = Server(params)
sys.stdin.read()
"""


class HeldLoad:
    """A context manager around a llama.cpp server that keeps loading its model until `release`.

    It is held by a write lease on a copy of the model: the kernel blocks every `open` of the file until the lease is
    released, or broken by the kernel after 45 seconds.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._port = unused_port()
        self.base_url = f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()
        copy = Path(self._directory.name) / self._model.name
        shutil.copyfile(self._model, copy)
        self._lease: int | None = _leased(copy)
        command = [sys.executable, "-c", _PROGRAM, str(copy), str(self._port)]
        self._process = subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: self.health() == 503, timeout=30, message="the server listens")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def release(self) -> None:
        """Let the model be loaded; a second call does nothing."""
        lease, self._lease = self._lease, None
        if lease is not None:
            os.close(lease)

    def health(self) -> int:
        """The status of its /health: 503 while it loads, 200 when it has; 0 before it listens."""
        try:
            return httpx2.get(f"http://127.0.0.1:{self._port}/health", trust_env=False, timeout=5).status_code
        except httpx2.TransportError:
            return 0

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self.release()
        self._directory.cleanup()


def _leased(path: Path) -> int:
    lease = os.open(path, os.O_RDWR)
    # The kernel signals the holder when another process waits. The default signal would end this process; SIGURG is ignored.
    fcntl.fcntl(lease, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return lease
