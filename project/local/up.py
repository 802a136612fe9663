"""`make up`: everything on this machine at http://127.0.0.1:8000 until Ctrl-C, the processes of the Procfile.

Environment variables override the defaults: DATABASE_URL and REDIS_URL replace SQLite and the embedded Valkey,
SLUICEGATE_PORT and SLUICEGATE_MODELS_PORT replace 8000 and 8089.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from project.local.model_files import ModelFilesError, models_dir, prepare
from project.local.model_server import DEFAULT_PORT
from project.local.processes import CHECKOUT, end, foreground, is_free, say
from project.runtime.embedded import EmbeddedValkeyError, ensure_valkey, is_embedded

_DEFAULT_SITE_PORT = 8000


def main() -> int:
    var_dir = Path(os.environ.get("VAR_DIR") or CHECKOUT / "var").resolve()
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    ports = {
        "SLUICEGATE_PORT": os.environ.get("SLUICEGATE_PORT") or str(_DEFAULT_SITE_PORT),
        "SLUICEGATE_MODELS_PORT": os.environ.get("SLUICEGATE_MODELS_PORT") or str(DEFAULT_PORT),
    }
    environ = {**os.environ, **ports, "PATH": programs, "VAR_DIR": str(var_dir), "PYTHONUNBUFFERED": "1"}
    try:
        for name, port in ports.items():
            if not is_free(int(port)):
                raise UpError(f"port {port} on 127.0.0.1 is in use: end the process that uses it, or set {name}")
        var_dir.mkdir(parents=True, exist_ok=True)
        prepare(models_dir(var_dir), say)
        with ExitStack() as running:
            if is_embedded():
                # Held here too, so that the last holder stops the server even if a process of the stack is killed.
                running.enter_context(ensure_valkey(var_dir))
            urls = [
                f"http://127.0.0.1:{ports['SLUICEGATE_PORT']}",
                f"http://127.0.0.1:{ports['SLUICEGATE_MODELS_PORT']}/v1",
            ]
            if foreground([sys.executable, "-m", "project.local.first_start", *urls], environ):
                raise UpError("the database could not be prepared")
            return _serve(environ)
    except (EmbeddedValkeyError, ModelFilesError, UpError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


class UpError(Exception):
    """The stack cannot start. The message is one line."""


def _serve(environ: Mapping[str, str]) -> int:
    """Run the Procfile with honcho until it ends. After Ctrl-C or SIGTERM the exit status is 0."""
    asked: list[int] = []
    honcho = subprocess.Popen(
        [sys.executable, "-m", "honcho", "start"], cwd=CHECKOUT, env=environ, start_new_session=True
    )

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        honcho.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        status = honcho.wait()
    finally:
        end(honcho)
    return 0 if asked else status


if __name__ == "__main__":
    sys.exit(main())
