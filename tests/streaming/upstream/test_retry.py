"""Classification and retry, as tables: what an error means, whether there is another attempt, what an end is called."""

import asyncio
import concurrent.futures
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.errors import causes
from streaming.states import TURN_ENDED
from streaming.upstream.errors import (
    EndState,
    FinishGraceElapsedError,
    ProtocolError,
    ProviderFrameError,
    ProviderStatusError,
    StreamCancelledError,
    StreamInactivityTimeoutError,
    StreamLifetimeExceededError,
    StreamRequestTimeoutError,
    StreamTruncatedError,
    TransportError,
)
from streaming.upstream.retry import (
    TRANSPORT_CODES,
    RetryClassification,
    RetryKind,
    RetryPolicy,
    classify_retry_error,
    decide_retry,
    end_of,
)

FACTS = {"budget_ms": 100, "chunks": 3, "bytes_received": 400, "lifetime_ms": 900}


def idle(kind="silent"):
    return StreamInactivityTimeoutError("no stream activity", kind=kind, **FACTS)


def caused(error, *chain):
    """The error, with the chain as its cause, its cause's cause, and so on."""
    tail = error
    for cause in chain:
        tail.__cause__ = cause
        tail = cause
    return error


def coded(code, error=None):
    error = error or Exception("whatever it says: ECONNRESET aborted 503 timeout")
    error.code = code
    return error


EVERY_ADDRESS = ExceptionGroup("", [OSError(), ConnectionRefusedError(errno.ECONNREFUSED, "")])
CLASSIFIED = [
    # error, kind, retryable, transport code
    (StreamCancelledError(), "abort", False, None),
    (asyncio.CancelledError(), "abort", False, None),
    (concurrent.futures.CancelledError(), "abort", False, None),
    (coded("ETIMEDOUT", asyncio.CancelledError()), "abort", False, None),
    (caused(StreamCancelledError(), ConnectionResetError(errno.ECONNRESET, "")), "abort", False, None),
    (idle(), "transport", True, "ETIMEDOUT"),
    (idle("keepalive"), "transport", True, "ETIMEDOUT"),
    (caused(idle(), asyncio.CancelledError()), "transport", True, "ETIMEDOUT"),
    (StreamRequestTimeoutError("no answer", **FACTS), "transport", True, "ETIMEDOUT"),
    (TransportError("connection_reset", "", transport_code="ECONNRESET"), "transport", True, "ECONNRESET"),
    (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "transport", True, "ECONNREFUSED"),
    (BrokenPipeError(errno.EPIPE, "pipe"), "transport", True, "EPIPE"),
    (caused(Exception(), Exception(), ConnectionResetError(errno.ECONNRESET, "")), "transport", True, "ECONNRESET"),
    (caused(Exception(), coded("ESOCKETTIMEDOUT")), "transport", True, "ESOCKETTIMEDOUT"),
    (caused(OSError("all of them"), EVERY_ADDRESS), "transport", True, "ECONNREFUSED"),
    (coded("EHOSTUNREACH"), "none", False, None),
    (coded("etimedout"), "none", False, None),
    (coded("ETIMEDOUT "), "none", False, None),
    (coded(errno.ETIMEDOUT), "none", False, None),
    (OSError(errno.EHOSTUNREACH, "unreachable"), "none", False, None),
    (TimeoutError("timed out"), "none", False, None),
    (StreamLifetimeExceededError("lifetime", **FACTS), "none", False, None),
    (TransportError("pool_timeout", "our own queue"), "none", False, None),
    (ProtocolError("malformed_json", "not JSON"), "none", False, None),
    (ValueError("ECONNRESET"), "none", False, None),
    (ProviderStatusError(400, "too long"), "status", False, None),
    (ProviderStatusError(401, "key"), "status", False, None),
    (ProviderStatusError(404, "no such model"), "status", False, None),
    (ProviderStatusError(307, ""), "status", False, None),
    (ProviderStatusError(408, ""), "status", True, None),
    (ProviderStatusError(429, ""), "status", True, None),
    (ProviderStatusError(500, ""), "status", True, None),
    (ProviderStatusError(503, "Loading model"), "status", True, None),
    (ProviderFrameError("x"), "error_frame", False, None),
    (ProviderFrameError("x", provider_code="ETIMEDOUT"), "error_frame", False, None),
    (ProviderFrameError("x", provider_code="invalid_request_error"), "error_frame", False, None),
    (ProviderFrameError("x", provider_code="rate_limit_exceeded"), "error_frame", True, None),
    (ProviderFrameError("x", status=502), "error_frame", True, None),
    (ProviderFrameError("x", status=400, provider_code="bad"), "error_frame", False, None),
    (StreamTruncatedError("no_content"), "content", True, None),
    (StreamTruncatedError("no_chunks"), "content", True, None),
]


@pytest.mark.parametrize(("error", "kind", "retryable", "transport_code"), CLASSIFIED)
def test_classification(error, kind, retryable, transport_code):
    classification = classify_retry_error(error)
    assert (classification.kind, classification.retryable, classification.transport_code) == (
        kind,
        retryable,
        transport_code,
    )


def test_the_closed_list():
    assert sorted(TRANSPORT_CODES) == ["ECONNREFUSED", "ECONNRESET", "EPIPE", "ESOCKETTIMEDOUT", "ETIMEDOUT"]


@given(st.lists(st.sampled_from([None, "ECONNRESET", "EOTHER"]), min_size=1, max_size=60), st.data())
def test_a_cause_chain_may_be_a_cycle(codes, data):
    chain = [coded(code) if code else Exception() for code in codes]
    caused(*chain)
    chain[-1].__cause__ = data.draw(st.sampled_from([None, *chain]))
    walked = list(causes(chain[0]))
    assert walked == chain[: len(walked)]
    classification = classify_retry_error(chain[0])
    expected = RetryKind.TRANSPORT if "ECONNRESET" in codes[:50] else RetryKind.NONE
    assert classification.kind == expected


def test_an_error_whose_code_is_a_property_of_another_type_is_not_retryable():
    class Odd(Exception):
        code = {"ETIMEDOUT"}
        errno = True
        status = "503"

    assert classify_retry_error(Odd()) == RetryClassification(RetryKind.NONE, retryable=False)


TRANSPORT = RetryClassification(RetryKind.TRANSPORT, retryable=True, transport_code="ETIMEDOUT")
CONTENT = RetryClassification(RetryKind.CONTENT, retryable=True)
ABORT = RetryClassification(RetryKind.ABORT, retryable=False)
DECIDED = [
    # classification, delivered, transport retries, content retries -> retry, counts as, reason
    (TRANSPORT, False, 0, 0, True, "transport", "retry_transport"),
    (TRANSPORT, False, 1, 0, True, "transport", "retry_transport"),
    (TRANSPORT, False, 2, 0, False, "none", "retries_exhausted"),
    (TRANSPORT, False, 1, 1, False, "none", "retries_exhausted"),
    (TRANSPORT, True, 0, 0, False, "none", "already_delivered"),
    (CONTENT, False, 0, 0, True, "content", "retry_content"),
    (CONTENT, False, 1, 0, True, "content", "retry_content"),
    (CONTENT, False, 0, 2, False, "none", "retries_exhausted"),
    (CONTENT, True, 0, 0, False, "none", "already_delivered"),
    (ABORT, False, 0, 0, False, "none", "not_retryable_abort"),
    (RetryClassification(RetryKind.NONE, False), False, 0, 0, False, "none", "not_retryable_none"),
    (RetryClassification(RetryKind.STATUS, True, status=503), False, 0, 0, True, "transport", "retry_status"),
    (RetryClassification(RetryKind.STATUS, False, status=400), False, 0, 0, False, "none", "not_retryable_status"),
]


@pytest.mark.parametrize(("classification", "delivered", "transport", "content", "retry", "counts", "reason"), DECIDED)
def test_decision(classification, delivered, transport, content, retry, counts, reason):
    decision = decide_retry(classification, delivered=delivered, transport_retries=transport, content_retries=content)
    assert (decision.retry, decision.counts_as, decision.reason) == (retry, counts, reason)


@given(
    st.builds(RetryClassification, st.sampled_from(RetryKind), st.booleans()),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_what_was_delivered_is_never_replayed_and_two_retries_are_all(classification, delivered, transport, content):
    decision = decide_retry(classification, delivered=delivered, transport_retries=transport, content_retries=content)
    assert not (decision.retry and (delivered or transport + content >= 2 or not classification.retryable))


def test_delays_double_and_a_providers_own_wish_is_kept_within_the_bound():
    policy = RetryPolicy(max_retries=5, base_delay_ms=100, max_delay_ms=300)

    def delay(made, retry_after_ms=None):
        wish = RetryClassification(RetryKind.STATUS, True, status=429, retry_after_ms=retry_after_ms)
        return decide_retry(wish, delivered=False, transport_retries=made, content_retries=0, policy=policy)

    assert [delay(made).delay_ms for made in range(4)] == [100, 200, 300, 300]
    assert delay(0, 250).delay_ms == 250
    assert delay(0, 0).delay_ms == 0
    assert (delay(0, 301).retry, delay(0, 301).reason) == (False, "retry_after_too_long")


ENDS = [
    (None, "completed", ""),
    (FinishGraceElapsedError("nothing followed", **FACTS), "completed", ""),
    (StreamTruncatedError("no_finish_reason"), "truncated", "no_finish_reason"),
    (idle("empty_chunks"), "idle_timeout", "empty_chunks"),
    (StreamLifetimeExceededError("lifetime", **FACTS), "lifetime_exceeded", "attempt"),
    (ProviderStatusError(500, ""), "provider_error", "status"),
    (ProviderFrameError(""), "provider_error", "error_frame"),
    (ProtocolError("invalid_utf8", ""), "protocol_error", "invalid_utf8"),
    (StreamRequestTimeoutError("no answer", **FACTS), "transport_error", "headers_timeout"),
    (TransportError("connection_refused", ""), "transport_error", "connection_refused"),
    (StreamCancelledError(), "cancelled", "user"),
    (asyncio.CancelledError(), "interrupted", "cancelled"),
    (RuntimeError(), "interrupted", "internal_error"),
]


@pytest.mark.parametrize(("error", "end_state", "error_kind"), ENDS)
def test_every_end_has_its_name(error, end_state, error_kind):
    assert end_of(error) == (end_state, error_kind)


def test_every_end_state_is_named_once_and_a_turn_knows_them_all():
    assert {end_state for _, end_state, _ in ENDS} == set(EndState)
    assert {str(state) for state in TURN_ENDED} == {str(state) for state in EndState}


def test_an_inactivity_error_says_what_happened():
    error = idle("keepalive")
    assert (error.code, error.idle_ms, error.chunks_received, error.bytes_received) == ("ETIMEDOUT", 100, 3, 400)
    assert (error.stream_lifetime_ms, error.kind) == (900, "keepalive")
