"""The end of runs, whoever works on them."""

from __future__ import annotations

from collections.abc import Iterable

from embeddings.models import TenantRun
from embeddings.states import RUN_UNFINISHED
from project.local.processes import within

_LONGEST_S = 120.0


def await_end(runs: Iterable[TenantRun]) -> None:
    """Returns once none of them is unfinished; fails after two minutes."""
    unfinished = TenantRun.objects.filter(pk__in=[run.pk for run in runs], status__in=RUN_UNFINISHED)
    assert within(lambda: not unfinished.exists(), _LONGEST_S), "the sweep did not end"
