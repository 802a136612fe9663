"""The budget table: what an unset value takes, what disables, and what is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.upstream.budgets import LARGEST_BUDGET_MS, ChatBudgets, InvalidBudgetError, resolve_budgets

FOLLOWERS = ("request_timeout_ms", "stream_first_content_timeout_ms", "stream_keepalive_timeout_ms")
INDEPENDENT = {"stream_lifetime_ms": 900_000, "turn_wall_ms": 3_600_000, "finish_grace_ms": 10_000}
ALL = (*FOLLOWERS, *INDEPENDENT, "stream_idle_timeout_ms")


def test_defaults():
    assert resolve_budgets() == ChatBudgets()
    assert resolve_budgets().describe() == (
        "request_timeout_ms=120000 stream_first_content_timeout_ms=120000 stream_idle_timeout_ms=120000"
        " stream_keepalive_timeout_ms=120000 stream_lifetime_ms=900000 turn_wall_ms=3600000 finish_grace_ms=10000"
    )


@pytest.mark.parametrize("idle", [1, 5_000, LARGEST_BUDGET_MS])
def test_an_unset_budget_takes_the_idle_budgets_value(idle):
    budgets = resolve_budgets(stream_idle_timeout_ms=idle)
    assert {getattr(budgets, name) for name in FOLLOWERS} == {idle}
    assert {name: getattr(budgets, name) for name in INDEPENDENT} == INDEPENDENT


@pytest.mark.parametrize("idle", [0, -1, -(2**31), -(10**30)])
def test_an_unset_budget_is_disabled_with_the_idle_budget(idle):
    budgets = resolve_budgets(stream_idle_timeout_ms=idle)
    assert {getattr(budgets, name) for name in (*FOLLOWERS, "stream_idle_timeout_ms")} == {0}
    assert {name: getattr(budgets, name) for name in INDEPENDENT} == INDEPENDENT
    assert "stream_idle_timeout_ms=off" in budgets.describe()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("idle", [0, 7_000])
def test_an_explicit_value_always_wins(name, idle):
    asked = {"stream_idle_timeout_ms": idle} | {name: 4_321}
    assert getattr(resolve_budgets(**asked), name) == 4_321
    assert getattr(resolve_budgets(**(asked | {name: 0})), name) == 0


@pytest.mark.parametrize("name", ALL)
def test_nonsense_is_refused_by_name(name):
    for nonsense in (float("nan"), float("inf"), 1.5, 100.0, "120000", "", True, False, 2**31, 10**5000, [], object()):
        with pytest.raises(InvalidBudgetError) as caught:
            resolve_budgets(**{name: nonsense})
        assert caught.value.name == name
        assert name in str(caught.value)
        assert len(str(caught.value)) < 300


@given(st.dictionaries(st.sampled_from(ALL), st.none() | st.integers(-(2**40), LARGEST_BUDGET_MS)))
def test_every_resolved_budget_is_usable(asked):
    budgets = resolve_budgets(**asked)
    assert all(0 <= getattr(budgets, name) <= LARGEST_BUDGET_MS for name in ALL)
