"""The timeout contract: which errors are provider timeouts, and the ordered notification (pure)."""

import concurrent.futures

import pytest
from django.db import OperationalError

from embeddings import codes, errors
from embeddings.timeouts import (
    PROVIDER_TIMEOUT_CODES,
    OpenAICompatibleRequestTimeout,
    ProviderTimeoutError,
    is_provider_timeout,
    notify_provider_timeout,
)

FOUR = {"PROVIDER_TIMEOUT", "OPENAI_COMPATIBLE_REQUEST_TIMEOUT", "ETIMEDOUT", "ESOCKETTIMEDOUT"}


class Coded(Exception):
    def __init__(self, code):
        super().__init__()
        self.code = code


class StringOfItsOwn(str):
    """Equal to a code, and not a plain string."""


class Raises:
    @property
    def code(self):
        raise RuntimeError("no code for you")


def with_code(error, code):
    error.code = code
    return error


class TestThePredicate:
    def test_knows_exactly_four_codes(self):
        assert PROVIDER_TIMEOUT_CODES == FOUR

    @pytest.mark.parametrize("code", sorted(FOUR))
    def test_holds_for_each_whatever_carries_it(self, code):
        assert is_provider_timeout(Coded(code))
        assert is_provider_timeout(type("Anything", (), {"code": code})())

    def test_holds_for_the_typed_errors(self):
        assert is_provider_timeout(ProviderTimeoutError("x"))
        assert is_provider_timeout(OpenAICompatibleRequestTimeout("x"))

    @pytest.mark.parametrize(
        "code",
        [
            "provider_timeout",
            "PROVIDER_TIMEOUT ",
            " ETIMEDOUT",
            "ETIMEDOUT_2",
            "XETIMEDOUT",
            "ETIME",
            "",
            None,
            b"ETIMEDOUT",
            110,
            True,
            ["ETIMEDOUT"],
            StringOfItsOwn("ETIMEDOUT"),
            codes.PROVIDER_TIMED_OUT,
            codes.CIRCUIT_OPEN,
        ],
    )
    def test_compares_exactly(self, code):
        assert not is_provider_timeout(Coded(code))

    @pytest.mark.parametrize(
        "error",
        [
            TimeoutError("canceling statement due to statement timeout"),
            TimeoutError(110, "ETIMEDOUT"),
            OperationalError("ETIMEDOUT"),
            TimeoutError(),
            concurrent.futures.TimeoutError(),
            errors.OwnTimeout("x"),
            errors.ProviderBusy("x", status=429, retry_after_ms=None),
            errors.ModelNotLoaded("x"),
            errors.DispatchNotAllowed("x"),
            errors.UnexpectedStatus("x", status=504),
            Raises(),
            None,
            object(),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_is_no_matter_of_type_or_text(self, error):
        assert not is_provider_timeout(error)

    @pytest.mark.parametrize("error", list(vars(errors).values()), ids=list(vars(errors)))
    def test_no_error_of_ours_but_the_contracts_own_is_one(self, error):
        assert getattr(error, "code", None) not in FOUR


class TestTheNotification:
    def test_calls_back_synchronously_with_the_source_error(self):
        heard = []
        error = ProviderTimeoutError("x")
        assert notify_provider_timeout(error, heard.append)
        assert heard == [error]

    def test_of_another_error_calls_nobody(self):
        heard = []
        assert not notify_provider_timeout(errors.OwnTimeout("x"), heard.append)
        assert heard == []

    def test_without_an_owner_calls_nobody(self):
        assert not notify_provider_timeout(ProviderTimeoutError("x"), None)

    def test_contains_what_the_callback_raises_and_logs_its_class_alone(self, caplog):
        def callback(error):
            raise LookupError("a tenant's text")

        assert notify_provider_timeout(ProviderTimeoutError("x"), callback)
        assert "LookupError" in caplog.text
        assert "tenant" not in caplog.text
