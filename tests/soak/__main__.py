"""`python -m tests.soak --seconds 1800 --database postgresql --seed 1`: exits 1, with the schedule, on a violation."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TextIO

import django
from django.core.management import call_command


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="sluicegate-soak-"))
    # Before the settings are read: nothing of the machine's own environment reaches the soak.
    from tests.soak.databases import database
    from tests.support import environment  # noqa: F401

    try:
        with database(options.database, folder) as chosen:
            os.environ |= {"DATABASE_URL": chosen.url, "DJANGO_SETTINGS_MODULE": "project.settings"}
            django.setup()
            call_command("migrate", verbosity=0)
            from tests.soak.rounds import Soak, Violation

            soak = Soak(options.seconds, options.seed, lambda line: _say(line, sys.stderr))
            try:
                summary = soak.run(chosen, folder)
            except Violation as found:
                _say("\n".join(("VIOLATION", *found.args)))
                return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary["database"] = options.database
    _say(json.dumps(summary) if options.json else "\n".join(f"{name}: {value}" for name, value in summary.items()))
    return 0


def _say(line: str, stream: TextIO | None = None) -> None:
    """To standard output unless told otherwise, at once: a soak that is cut short must have printed its schedule."""
    stream = stream or sys.stdout
    stream.write(f"{line}\n")
    stream.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="no round starts after so long")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="draws the mischief; printed")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
