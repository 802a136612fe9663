"""`python -m benchmarks.on_stage NAME DATABASE RESULTS`: one benchmark, in the process whose Django stands on the stage."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import django


def main() -> None:
    name, database, results = sys.argv[1:]
    django.setup()
    rows = importlib.import_module(f"benchmarks.{name}").run(database)
    Path(results).write_text(json.dumps([row.as_json() for row in rows]))


if __name__ == "__main__":
    main()
