"""`python -m benchmarks.on_stage NAME DATABASE RESULTS`: one benchmark, in the process whose Django stands on the stage."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path

import django


def main() -> None:
    name, database, results = sys.argv[1:]
    # So that whatever the benchmark started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    django.setup()
    rows = importlib.import_module(f"benchmarks.{name}").run(database)
    Path(results).write_text(json.dumps([row.as_json() for row in rows]))


if __name__ == "__main__":
    main()
