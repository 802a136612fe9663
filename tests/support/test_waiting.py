import pytest

from tests.support.waiting import eventually


def test_the_first_truthy_value_is_returned() -> None:
    values = iter([0, "", [1]])
    assert eventually(lambda: next(values), interval=0) == [1]


def test_waiting_in_vain_names_what_was_awaited_and_what_was_seen() -> None:
    with pytest.raises(AssertionError, match=r"two rows \(last value: 0\)"):
        eventually(lambda: 0, timeout=0.01, message="two rows")
