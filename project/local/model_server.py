"""The local model server: llama.cpp in this process, with MiniLM for embeddings and SmolLM2 for chat at one address.

`python -m project.local.model_server prepare` downloads the models; `... serve` serves them at http://127.0.0.1:8089/v1
until SIGTERM or Ctrl-C. `ModelServer` runs the latter as a child, for the demo, the tests and the benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import urlsplit

from project.local.model_files import MINILM, SMOLLM2, ModelFilesError, models_dir, prepare
from project.local.model_front import ModelFront
from project.local.processes import CHECKOUT, say

DEFAULT_PORT = 8089
EMBEDDING_MODEL = "minilm"
CHAT_MODEL = "smollm2"
_SLOTS = 4
_EMBEDDING_TOKENS = 512
# For each slot: a prompt of 2,000 tokens and an answer of 1,000.
_CHAT_TOKENS = 3072
# So small a model does not always end its answer by itself.
_ANSWER_TOKENS = 512
_READY_WORD = "ready"
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


class LocalModelsError(Exception):
    """The local model server cannot run. The message is one line."""

    code = "LOCAL_MODELS_UNAVAILABLE"


class ModelServer:
    """A context manager: the local model server as a child process on a free port (or `port`), ready when entered.

    It ends with the block, and by itself when this process is killed. Raises LocalModelsError if it is not ready in
    time; the models must have been prepared.
    """

    embedding_model = EMBEDDING_MODEL
    chat_model = CHAT_MODEL

    def __init__(self, directory: Path, port: int = 0) -> None:
        self._directory = directory
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "project.local.model_server", "serve", "--until-stdin-closes"]
        command += ["--port", str(self._port), "--models-dir", str(self._directory)]
        self._process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            assert self._process.stdout is not None  # noqa: S101 - a pipe was requested
            line = _line_within(self._process.stdout, _READY_TIMEOUT_S)
            if not line.startswith(_READY_WORD):
                self._log.seek(0)
                logged = self._log.read().decode(errors="replace").strip().splitlines()
                reason = logged[-1] if logged else "it printed nothing"
                raise LocalModelsError(f"the local model server did not start: {reason}")
            self.base_url = line.split()[-1]
            on_failure.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the child; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                stream.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: prepare, or serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m project.local.model_server", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--models-dir", type=Path)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("prepare", parents=[common])
    serve = verbs.add_parser("serve", parents=[common])
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one")
    serve.add_argument("--until-stdin-closes", action="store_true", help="end with the process that started this one")
    options = parser.parse_args(arguments)
    directory = options.models_dir or models_dir(Path(os.environ.get("VAR_DIR") or CHECKOUT / "var"))
    try:
        prepare(directory, say)
        if options.verb == "serve":
            asyncio.run(_serve(directory, options.port, options.until_stdin_closes))
    except (ModelFilesError, LocalModelsError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


async def _serve(directory: Path, port: int, until_stdin_closes: bool) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), stopping.set)
    embeddings = _llama(directory / MINILM.file_name, _embedding_options())
    chat_options = {"model_alias": {CHAT_MODEL}, "n_ctx": _SLOTS * _CHAT_TOKENS, "n_predict": _ANSWER_TOKENS}
    chat = _llama(directory / SMOLLM2.file_name, chat_options)
    front = ModelFront((EMBEDDING_MODEL, CHAT_MODEL), {"/embeddings": _port(embeddings)}, _port(chat))
    try:
        listener = await front.start(port)
    except OSError as error:
        raise LocalModelsError(f"port {port} on 127.0.0.1 cannot be opened: {error.strerror}") from error
    bound_port = listener.sockets[0].getsockname()[1]
    say(f"{_READY_WORD}: {EMBEDDING_MODEL} and {CHAT_MODEL} at http://127.0.0.1:{bound_port}/v1")
    await stopping.wait()
    listener.close()
    await front.stop()


def _embedding_options() -> dict[str, Any]:
    from xllamacpp import llama_pooling_type

    return {
        "model_alias": {EMBEDDING_MODEL},
        "embedding": True,
        "pooling_type": llama_pooling_type.LLAMA_POOLING_TYPE_MEAN,
        "n_ctx": _SLOTS * _EMBEDDING_TOKENS,
        "n_batch": _SLOTS * _EMBEDDING_TOKENS,
        "n_ubatch": _EMBEDDING_TOKENS,
    }


def _llama(model: Path, options: dict[str, Any]) -> Any:
    """Starts a llama.cpp server on a free port of 127.0.0.1, ready when this returns; it stops with the object."""
    from xllamacpp import CommonParams, Server  # here: `prepare` and ModelServer do not need its 60 MB

    params = CommonParams()
    params.model.path = str(model)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = _SLOTS
    # Its cache of old prompts otherwise grows to gigabytes.
    params.cache_ram_mib = 0
    params.ui = False
    params.verbosity = 1
    for name, value in options.items():
        setattr(params, name, value)
    try:
        server = Server(params)
    except (RuntimeError, ValueError) as error:
        raise LocalModelsError(f"llama.cpp cannot serve {model.name}: {error}") from error
    _wait_until_its_queue_runs(_port(server))
    return server


def _wait_until_its_queue_runs(port: int) -> None:
    """Waits for `/slots`, which the queue answers (`/health` does not): a server stopped before its queue runs never stops."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_TIMEOUT_S)
    try:
        connection.request("GET", "/slots")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        raise LocalModelsError(f"llama.cpp does not answer: {error}") from error
    finally:
        connection.close()


def _port(server: Any) -> int:
    port: int | None = urlsplit(str(server.listening_address)).port
    if port is None:
        raise LocalModelsError(f"llama.cpp reports no port: {server.listening_address}")
    return port


def _line_within(stream: IO[bytes], timeout_s: float) -> str:
    """The ready line, or the whole output if the stream ends or the time runs out first."""
    deadline = time.monotonic() + timeout_s
    said = b""
    with selectors.DefaultSelector() as selector:
        # The bare descriptor: a buffered reader would hide lines from the selector.
        selector.register(stream.fileno(), selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(stream.fileno(), 4096)
            said += piece
            for line in said.decode(errors="replace").splitlines():
                if line.startswith(_READY_WORD) and said.endswith(b"\n"):
                    return line
            if not piece:
                break
    return said.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
