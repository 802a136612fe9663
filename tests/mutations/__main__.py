"""Runs the mutation proof. Exit status 0 if every mutation was seen, 1 if one was not, 2 if one could not be tried."""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from tests.mutations import page
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = pathlib.Path(__file__).resolve().parents[2]
_LEFT_BEHIND = (".git", ".venv", "var", "__pycache__", "*_cache", ".hypothesis", "node_modules")
_SECONDS_MAX = 240
_TESTS_FAILED = 1


@dataclass(frozen=True)
class Result:
    """`status` is "seen", "NOT SEEN" or "broken" (nothing could be said); `witness` the first test that failed.

    A witness has passed in the same copy without the mutation.
    """

    mutation: Mutation
    status: str
    witness: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree at work (2)")
    parser.add_argument("--missing", action="store_true", help="only mutations that docs/mutations.md lacks")
    parser.add_argument("--docs", action="store_true", help="put the rows of this run into docs/mutations.md")
    options = parser.parse_args(arguments)
    chosen = [each for each in MUTATIONS if not options.words or any(word in each.name for word in options.words)]
    if options.missing:
        chosen = [each for each in chosen if each.name not in page.rows()]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sluicegate-mutations-") as folder:
        results = _try_all(chosen, pathlib.Path(folder), options.jobs)
    sys.stdout.write(table(results))
    if options.docs:
        page.write({result.mutation.name: row(result) for result in results}, [each.name for each in MUTATIONS])
    seen = sum(result.status == "seen" for result in results)
    sys.stdout.write(f"\n{seen} of {len(results)} mutations were seen, in {time.monotonic() - began:.0f} s.\n")
    return max((_exit_status(result) for result in results), default=2)


def table(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    return page.HEAD + "".join(f"{row(result)}\n" for result in results)


def row(result: Result) -> str:
    mutation = result.mutation
    return f"| {mutation.name} | {mutation.guarantee} | `{mutation.file}` | {result.status} | `{result.witness}` |"


def mutated(text: str, mutation: Mutation) -> str:
    """The file's text with its mechanism broken. Raises ValueError unless the text to replace stands in it once."""
    found = text.count(mutation.old)
    if found != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} holds the text to replace {found} times, not once")
    return text.replace(mutation.old, mutation.new)


def _try_all(chosen: Sequence[Mutation], folder: pathlib.Path, jobs: int) -> list[Result]:
    copies: SimpleQueue[pathlib.Path] = SimpleQueue()
    for number in range(jobs):
        copy = folder / str(number)
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_LEFT_BEHIND))
        copies.put(copy)

    def carry_out(mutation: Mutation) -> Result:
        copy = copies.get()
        try:
            result = _try(mutation, copy)
        finally:
            copies.put(copy)
        sys.stderr.write(f"{result.status:>8}  {result.seconds:5.1f} s  {mutation.name}\n")
        return result

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(carry_out, chosen))


def _try(mutation: Mutation, copy: pathlib.Path) -> Result:
    began = time.monotonic()
    with _broken(mutation, copy):
        status, output = _run_tests(mutation.tests, copy)
    named, witness = _judged(status, output, copy)
    return Result(mutation, named, witness, time.monotonic() - began)


def _judged(status: int, output: str, copy: pathlib.Path) -> tuple[str, str]:
    """What the run says, and its witness, which must pass where nothing is broken."""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    if status == 0:
        return "NOT SEEN", "-"
    if status != _TESTS_FAILED or failed is None:
        return "broken", " ".join(output.split())[-120:] or "no output"
    witness = failed.group(1)
    control, _ = _run_tests((witness,), copy)
    return "broken" if control else "seen", witness.removeprefix("tests/").partition("[")[0]


@contextmanager
def _broken(mutation: Mutation, copy: pathlib.Path) -> Iterator[None]:
    file = copy / mutation.file
    whole = file.read_text()
    file.write_text(mutated(whole, mutation))
    try:
        yield
    finally:
        file.write_text(whole)


def _run_tests(tests: Sequence[str], copy: pathlib.Path) -> tuple[int, str]:
    """pytest's exit status and output; a run that does not end in time could not be tried."""
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    # Bytecode is kept by the second and the size of its source: a mutation may have both.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"not within {_SECONDS_MAX} s"
    return ended.returncode, ended.stdout


def _exit_status(result: Result) -> int:
    return {"seen": 0, "NOT SEEN": 1}.get(result.status, 2)


if __name__ == "__main__":
    sys.exit(main())
