"""`python -m benchmarks.run_one NAME DATABASE RESULTS`: runs one benchmark in the sandbox of its environment."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path

import django


def main() -> None:
    name, database, results = sys.argv[1:]
    # Exit by an exception, so that the benchmark ends the processes it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    django.setup()
    rows = importlib.import_module(f"benchmarks.{name}").run(database)
    Path(results).write_text(json.dumps([row.as_json() for row in rows]))


if __name__ == "__main__":
    main()
