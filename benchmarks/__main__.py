"""`python -m benchmarks [NAME...]`: runs each benchmark in its own process and sandbox, and prints one table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.row import Row, as_markdown, from_json
from benchmarks.sandbox import POSTGRESQL, SQLITE, open_sandbox
from project.local.processes import CHECKOUT, end

# For each module: the databases it runs on, and the settings of its sandbox.
BENCHMARKS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "lane": ((SQLITE, POSTGRESQL), {}),
    "history": ((SQLITE,), {}),
    "scan": ((SQLITE,), {}),
    "circuit": ((SQLITE,), {}),
    "interactive": ((SQLITE,), {"LANE_BATCH_MAX_WAIT_MS": "1000"}),
    "relay": ((SQLITE,), {}),
    "streams": ((SQLITE,), {"CHAT_TURNS_PER_TENANT": "1000"}),
    "watchdog": ((SQLITE,), {}),
}
_LONGEST_S = 600
_PAGE = CHECKOUT / "docs" / "benchmarks.md"
_BEFORE, _AFTER = "<!-- the table -->\n", "<!-- its end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[[], *BENCHMARKS], metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--database", choices=(SQLITE, POSTGRESQL))
    parser.add_argument("--json", type=Path, default=CHECKOUT / "var" / "bench" / "results.json")
    parser.add_argument("--docs", action="store_true", help=f"put the table into {_PAGE.relative_to(CHECKOUT)}")
    options = parser.parse_args()
    rows: list[Row] = []
    started = time.monotonic()
    failed = []
    for name in options.names or BENCHMARKS:
        databases, settings = BENCHMARKS[name]
        for database in databases:
            if options.database in (None, database):
                found = _run(name, database, settings)
                failed += [] if found else [f"{name} on {database}"]
                rows += found
                for row in found:
                    print("  ".join(row.cells()), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": [row.as_json() for row in rows]}, indent=2))
    if options.docs:
        before, _, rest = _PAGE.read_text().partition(_BEFORE)
        _PAGE.write_text(f"{before}{_BEFORE}{as_markdown(rows)}\n{_AFTER}{rest.partition(_AFTER)[2]}")
    print(f"\n{as_markdown(rows)}\n\n{time.monotonic() - started:.0f} s; the numbers are in {options.json}")
    for each in failed:
        print(f"NOT MEASURED: {each}")
    return 1 if failed else 0


def _run(name: str, database: str, settings: dict[str, str]) -> list[Row]:
    """The benchmark's rows; none if its process failed, or was ended after ten minutes."""
    with open_sandbox(database, settings) as environ:
        results = Path(environ["VAR_DIR"]) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.run_one", name, database, str(results)]
        process = subprocess.Popen(command, cwd=CHECKOUT, env=environ)
        try:
            process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            print(f"{name} on {database}: ended after {_LONGEST_S} s", file=sys.stderr)
        finally:
            end(process)
        return [from_json(each) for each in json.loads(results.read_text())] if results.exists() else []


if __name__ == "__main__":
    sys.exit(main())
