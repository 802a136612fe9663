"""Runs a management command in this process as the command line would, and says how it ended."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

from django.core.management import call_command
from django.core.management.base import CommandError


@dataclass(frozen=True)
class Ended:
    """A command's end: its exit status and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def manage(*arguments: str) -> Ended:
    """`manage.py <arguments>`, without a terminal."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    try:
        call_command(*arguments, stdout=out, stderr=err)
    except CommandError as error:
        status = error.returncode
        err.write(f"{error}\n")
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    return Ended(status, out.getvalue(), err.getvalue())
