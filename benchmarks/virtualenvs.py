"""Virtual environments for the libraries that Sluicegate is compared with: created by the first run, then kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def bin_of(name: str, pins: Sequence[str]) -> Path:
    """The `bin` directory of a virtual environment with these packages."""
    root = Path(os.environ["BENCH_ENVIRONMENTS"]) / name
    stamp = root / "installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(pins):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(root)], check=True)
        pip = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *pins], check=True)
        stamp.write_text("\n".join(pins))
    return root / "bin"
