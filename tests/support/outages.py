"""Sweeps as processes of their own, each of which waits at one step while the test takes its database away."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import CHECKOUT, process_environ
from tests.support.provider_server import Gate, ProviderServer, containing, gated, hang, status
from tests.support.sweeps import DIMENSIONS, OPENAI, Site, make_site, texts
from tests.support.waiting import eventually

CALL_OUT = "call out"
TIMED_OUT_STEPS = ("final timeout", "slot freed")
STEPS = ("admit", CALL_OUT, *TIMED_OUT_STEPS, "busy reply", "settle", "store", "decide", "finish")


@dataclass(frozen=True)
class Ended:
    """A sweep process's end: its status and output, its seconds, and the provider's log."""

    status: int
    out: str
    err: str
    seconds: float
    site: Site

    @property
    def outcomes(self) -> dict[str, tuple[str, str]]:
        """Each repository's status and code, from the one JSON object on standard output."""
        assert self.out, (self.status, self.err)
        (run,) = json.loads(self.out)["runs"]
        return {one["repository"].split("/")[-1]: (one["status"], one["error_code"]) for one in run["outcomes"]}

    @property
    def calls(self) -> list[tuple[tuple[str, ...], str | None]]:
        """The texts of each call, and which side ended it."""
        return [(call.texts, call.ended_by) for call in self.site.server.embedding_calls]


class HeldSweep:
    """A sweep over the repositories A and B of one tenant at one provider, up to the step named."""

    def __init__(self, step: str, folder: Path, **environ: str) -> None:
        folder.mkdir()
        self.step, self.folder = step, folder
        self.server = ProviderServer(dimensions=DIMENSIONS)
        self.server.__enter__()
        self.gate = Gate()
        is_timeout = step in TIMED_OUT_STEPS
        deadline_ms = 1_000 if is_timeout else 60_000
        self.site = make_site(OPENAI, self.server, folder, batch_size=4, embedding_timeout_ms=deadline_ms)
        self.site.repository("a", *texts("alpha", 6))
        self.site.repository("b", *texts("beta", 6))
        if is_timeout:
            self.server.when(containing("alpha"), hang())
        elif step == CALL_OUT:
            self.server.when(containing("alpha"), gated(self.gate), times=1)
        elif step == "busy reply":
            self.server.when(containing("alpha"), status(429, headers={"Retry-After": "1"}), times=1)
        waits = {} if step == CALL_OUT else {"WAITS_AT": step, "WAITS_IN": str(folder)}
        self.environ = {"LEASE_MS": "15000", "LEASE_RENEW_MS": "1000"} | waits | environ

    def start(self, environ: Mapping[str, str] | None = None) -> HeldSweep:
        words = ("sweep", "--json", "--concurrency", "2", "--tenant", self.site.tenant.slug)
        self._out, self._err = self.folder / "out", self.folder / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.broken_workers.waits_at", *words],
                cwd=CHECKOUT,
                env=process_environ() | dict(environ or self.environ),
                stdout=out,
                stderr=err,
            )
        return self

    def wait_arrived(self) -> None:
        if self.step == CALL_OUT:
            self.gate.wait_arrived(timeout=60)
            return
        arrived = (self.folder / "arrived").exists
        eventually(lambda: arrived() or self.process.poll() is not None, timeout=60, message=f"{self.step} is reached")
        assert arrived(), self._err.read_text()

    def release(self) -> None:
        """Lets the step go: its transaction meets a database that is away."""
        (self.folder / "released").touch()

    def ended(self, seconds: float) -> Ended:
        return Ended(self.process.returncode, self._out.read_text(), self._err.read_text(), seconds, self.site)

    def end(self) -> None:
        if (process := getattr(self, "process", None)) and process.poll() is None:
            process.kill()
            process.wait()
        self.server.__exit__(None, None, None)


def wait_ended(*sweeps: HeldSweep) -> list[Ended]:
    """Answers the calls that are out, and waits for each sweep's end; counts its seconds from now."""
    since, seconds = time.monotonic(), [0.0] * len(sweeps)
    for one in sweeps:
        one.gate.release()

    def all_ended() -> bool:
        for number, one in enumerate(sweeps):
            if not seconds[number] and one.process.poll() is not None:
                seconds[number] = time.monotonic() - since
        return all(seconds)

    eventually(all_ended, timeout=90, message="the sweeps end")
    return [one.ended(took) for one, took in zip(sweeps, seconds, strict=True)]


TABLE_FOLLOWS, TABLE_ENDS = "<!-- table -->\n", "<!-- end of table -->\n"


def write_table(page: Path, results: Mapping[float, Mapping[str, Ended]]) -> None:
    """Replaces the page's table by the results: a row for each step, a column for each outage."""
    lengths = sorted(results)
    lines = ["| step | result | " + " | ".join(f"after {seconds:g} s" for seconds in lengths) + " |"]
    lines.append("|---|---|" + "---|" * len(lengths))
    for step in STEPS:
        ended = [results[seconds][step] for seconds in lengths]
        # One result, unless an outage changed it.
        result = " or ".join(sorted({_result(one) for one in ended}))
        lines.append(f"| {step} | {result} | " + " | ".join(f"{one.seconds:.1f} s" for one in ended) + " |")
    before, rest = page.read_text().split(TABLE_FOLLOWS)
    _, after = rest.split(TABLE_ENDS)
    page.write_text(before + TABLE_FOLLOWS + "\n".join(lines) + "\n" + TABLE_ENDS + after)


def _result(ended: Ended) -> str:
    outcomes = ", ".join(f"{slug.upper()} {code or status}" for slug, (status, code) in sorted(ended.outcomes.items()))
    broken_off = sum(ended_by == "client_closed" for _, ended_by in ended.calls)
    return f"{outcomes}; exit {ended.status}; {len(ended.calls)} calls, {broken_off} timed out"
