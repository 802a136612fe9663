"""The failure policy of embedding, row by row."""

import pytest

from embeddings.dispatch.failures import Action, FailedCall, decide_failure
from embeddings.errors import (
    ModelNotLoaded,
    OwnTimeout,
    ProviderBusy,
    ProviderConfigurationError,
    ProviderUnauthorized,
    ProviderUnreachable,
    ReplyNotFinite,
    ReplyRefused,
    ServerFailed,
    TextRefused,
    UnexpectedStatus,
)
from embeddings.timeouts import ETIMEDOUT, OpenAICompatibleRequestTimeout, ProviderTimeoutError

BUSY = ProviderBusy("", status=503, retry_after_ms=None)
TIMEOUTS = [ProviderTimeoutError(""), ProviderTimeoutError("", code=ETIMEDOUT), OpenAICompatibleRequestTimeout("")]
OF_A_TEXT = [TextRefused(""), ServerFailed(""), ReplyNotFinite("")]
OF_THE_SERVER = [
    ModelNotLoaded(""),
    OwnTimeout(""),
    ProviderConfigurationError(""),
    ProviderUnauthorized(""),
    ProviderUnreachable(""),
    ReplyRefused(""),
    UnexpectedStatus(""),
    ValueError(""),
]

WHOLE, HALF = {"texts": 32}, {"texts": 16, "is_half": True}
ALONE, LAST_HALF = {"texts": 1}, {"texts": 1, "is_half": True}
LATE, LATE_ALONE = {"texts": 32, "is_late": True}, {"texts": 1, "is_late": True}


def name_of(value):
    return type(value).__name__ if isinstance(value, Exception) else None


@pytest.mark.parametrize("facts", [WHOLE, HALF, ALONE, LAST_HALF, LATE, LATE_ALONE], ids=str)
@pytest.mark.parametrize("error", [*TIMEOUTS, *OF_THE_SERVER], ids=name_of)
def test_what_is_not_tied_to_a_text_fails_whatever_was_sent(error, facts):
    for takes_others in (None, True, False):
        call = FailedCall(is_interactive=False, takes_other_texts=takes_others, **facts)
        assert decide_failure(error, call) is Action.FAIL


@pytest.mark.parametrize("facts", [WHOLE, HALF, ALONE, LAST_HALF], ids=str)
def test_a_batch_of_a_busy_provider_goes_back(facts):
    assert decide_failure(BUSY, FailedCall(is_interactive=False, **facts)) is Action.REQUEUE


@pytest.mark.parametrize("error", [BUSY, *TIMEOUTS, *OF_A_TEXT, *OF_THE_SERVER], ids=name_of)
@pytest.mark.parametrize("facts", [WHOLE, ALONE, LATE, LATE_ALONE], ids=str)
def test_an_interactive_text_is_its_callers_to_repeat(error, facts):
    assert decide_failure(error, FailedCall(is_interactive=True, **facts)) is Action.FAIL


@pytest.mark.parametrize("error", OF_A_TEXT, ids=name_of)
@pytest.mark.parametrize(
    ("facts", "takes_other_texts", "action"),
    [
        (WHOLE, None, Action.SPLIT),
        (HALF, None, Action.SEND_CONTROL_TEXT),
        (HALF, True, Action.SPLIT),
        (HALF, False, Action.FAIL),
        (ALONE, None, Action.SEND_CONTROL_TEXT),
        (ALONE, True, Action.MARK_UNDELIVERABLE),
        (ALONE, False, Action.FAIL),
        (LAST_HALF, None, Action.SEND_CONTROL_TEXT),
        (LAST_HALF, True, Action.MARK_UNDELIVERABLE),
        (LAST_HALF, False, Action.FAIL),
        # The slot is free again: no control text can be sent in its place.
        (LATE, None, Action.SPLIT),
        (LATE_ALONE, None, Action.FAIL),
    ],
    ids=str,
)
def test_a_refused_text_is_isolated_and_marked_only_if_the_provider_takes_others(
    error, facts, takes_other_texts, action
):
    call = FailedCall(is_interactive=False, takes_other_texts=takes_other_texts, **facts)
    assert decide_failure(error, call) is action
