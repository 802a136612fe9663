"""The adapter of OpenAI-compatible servers, call by call: what leaves, and which typed error comes of which answer."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from threading import Event

import httpx2
import numpy as np
import openai
import pytest

from embeddings import errors
from embeddings.providers import http
from embeddings.providers.http import of_transport
from embeddings.providers.http_base import retry_after_ms
from embeddings.providers.openai_compatible import OpenAICompatibleProvider
from embeddings.providers.retries import retry_pause_s
from embeddings.timeouts import (
    ETIMEDOUT,
    OPENAI_COMPATIBLE_REQUEST_TIMEOUT,
    OpenAICompatibleRequestTimeout,
    ProviderTimeoutError,
    is_provider_timeout,
)
from project.runtime import event_loop
from tests.support.bare_server import bare_server
from tests.support.calling import adapter, call_of, embed, only_call, provider_at
from tests.support.provider_server import (
    ProviderServer,
    close_without_answer,
    default,
    drip,
    hang,
    hang_after_headers,
    reset,
    status,
    truncate,
    unused_address,
    vector_of,
    vectors,
)
from tests.support.sweeps import KEY, OPENAI


@pytest.fixture
def server():
    with ProviderServer(dimensions=8) as running:
        yield running


@pytest.fixture
def lane_server(server):
    with adapter(OpenAICompatibleProvider, provider_at(server.address, OPENAI)) as made:
        yield made


class TestWhatLeaves:
    def test_base64_is_asked_for(self, server, lane_server) -> None:
        found, reply = embed(lane_server, "one", "two")
        call = only_call(server)
        assert call.path == "/v1/embeddings"
        assert call.body == {"model": "embed", "input": ["one", "two"], "encoding_format": "base64"}
        assert np.array_equal(found, [vector_of("one", 8), vector_of("two", 8)])
        assert reply.calls == 1

    def test_nothing_of_the_environment(self, server, monkeypatch) -> None:
        for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
            monkeypatch.setenv(name, "not-for-you")
        monkeypatch.setenv("OPENAI_BASE_URL", unused_address())
        monkeypatch.setenv("http_proxy", unused_address())
        with adapter(OpenAICompatibleProvider, provider_at(server.address, OPENAI)) as made:
            embed(made, "one")
        assert "not-for-you" not in repr(dict(only_call(server).headers))

    def test_the_named_key(self, server, monkeypatch) -> None:
        monkeypatch.setenv(KEY, "sesame")
        with adapter(OpenAICompatibleProvider, provider_at(server.address, OPENAI, api_key_env=KEY)) as made:
            embed(made, "one")
        assert only_call(server).headers["authorization"] == "Bearer sesame"

    def test_a_text_is_re_posted_nowhere_else(self, server, lane_server) -> None:
        with ProviderServer() as elsewhere:
            server.next(status(307, headers={"Location": f"{elsewhere.openai_url}/embeddings"}))
            with pytest.raises(errors.UnexpectedStatus):
                embed(lane_server, "one")
            assert elsewhere.calls == []

    def test_no_cookie_of_an_earlier_call(self, server, lane_server) -> None:
        for _ in range(2):
            server.next(status(429, headers={"Set-Cookie": "session=of-the-first; Path=/"}))
            with pytest.raises(errors.ProviderBusy):
                embed(lane_server, "one")
        assert [call.headers.get("cookie") for call in server.embedding_calls] == [None, None]

    def test_a_handshake_that_is_broken_off_leaves_no_socket_open(self) -> None:
        closed = Event()

        def never_answers(connection) -> None:
            while connection.recv(65_536):
                pass
            closed.set()

        with bare_server(never_answers) as there:
            asked = provider_at(there.replace("http:", "https:"), OPENAI)
            with adapter(OpenAICompatibleProvider, asked) as made, pytest.raises(ProviderTimeoutError):
                embed(made, "one", deadline_s=0.2, is_interactive=True)
            assert closed.wait(1.0)

    def test_departure_is_told_before_the_answer(self, server, lane_server) -> None:
        server.next(hang())
        call = call_of(["one"], deadline_s=2.0)
        future = event_loop.submit(lane_server.embed(call))
        assert call.left.wait(5)
        assert not future.done()
        future.cancel()

    def test_a_cancel_closes_the_socket(self, server, lane_server) -> None:
        server.next(hang())
        future = event_loop.submit(lane_server.embed(call_of(["one"])))
        server.wait_for_calls(1)
        future.cancel()
        assert server.wait_until_ended(1).ended_by == "client_closed"


class TestTheFormatOnTrial:
    @pytest.fixture(autouse=True)
    def _refuses(self, server):
        server.script(lambda call: status(400) if "encoding_format" in call.body else None)

    def test_a_call_that_may_test_it_is_sent_once_more_without(self, lane_server) -> None:
        assert embed(lane_server, "one", may_test_format=True)[1].calls == 2
        assert lane_server.refuses_base64
        assert embed(lane_server, "two")[1].calls == 1

    def test_any_other_call_is_refused(self, lane_server) -> None:
        with pytest.raises(errors.TextRefused):
            embed(lane_server, "one")
        assert not lane_server.refuses_base64

    def test_a_server_that_took_it_once_is_not_doubted(self, server, lane_server) -> None:
        server.script(lambda call: None)
        embed(lane_server, "one")
        server.script(lambda call: status(400))
        with pytest.raises(errors.TextRefused) as raised:
            embed(lane_server, "two", may_test_format=True)
        assert (raised.value.calls, lane_server.refuses_base64) == (1, False)

    def test_a_refusal_of_both_says_nothing_about_the_format(self, server, lane_server) -> None:
        server.script(lambda call: status(400))
        with pytest.raises(errors.TextRefused) as raised:
            embed(lane_server, "one", may_test_format=True)
        assert (raised.value.calls, lane_server.refuses_base64) == (2, False)

    def test_what_was_learned_is_remembered(self, server) -> None:
        with adapter(OpenAICompatibleProvider, provider_at(server.address, OPENAI, refuses_base64=True)) as made:
            assert embed(made, "one")[1].calls == 1


def said(message: str) -> dict:
    return {"error": {"message": message}}


ANSWERS = [
    (status(400), errors.TextRefused, 1),
    (status(413), errors.TextRefused, 1),
    (status(422), errors.TextRefused, 1),
    (status(500, said("input (513 tokens) is too large to process")), errors.ServerFailed, 1),
    (status(401), errors.ProviderUnauthorized, 1),
    (status(403), errors.ProviderUnauthorized, 1),
    (status(404), errors.ModelNotLoaded, 4),
    (status(400, said("Model was unloaded while the request was still in queue..")), errors.ModelNotLoaded, 4),
    (status(400, said('Failed to load model "x". Error: Operation canceled.')), errors.ModelNotLoaded, 4),
    (status(400, said('Failed to load model "x". Error: out of memory')), errors.TextRefused, 1),
    (status(503, said("Loading model")), errors.ModelNotLoaded, 4),
    (status(503), errors.ProviderBusy, 1),
    (status(429), errors.ProviderBusy, 1),
    (status(408), errors.UnexpectedStatus, 1),
    (status(502, b"<html>"), errors.UnexpectedStatus, 1),
    (status(504), errors.UnexpectedStatus, 1),
    (status(418), errors.UnexpectedStatus, 1),
    (reset(), errors.ProviderUnreachable, 1),
    (close_without_answer(), errors.ProviderUnreachable, 1),
    (truncate(vectors(), 100), errors.ProviderUnreachable, 1),
]


class TestAnswers:
    @pytest.mark.parametrize(
        ("reply", "kind", "calls"), ANSWERS, ids=lambda value: getattr(value, "__name__", repr(value))
    )
    def test_each_has_its_typed_error_and_its_count(self, reply, kind, calls, server, lane_server) -> None:
        """The SDK's own retries, three by default, are off: the server counts."""
        server.script(lambda call: reply)
        with pytest.raises(errors.ProviderError) as raised:
            embed(lane_server, "one")
        assert type(raised.value) is kind
        assert raised.value.calls == calls == len(server.calls)
        assert not is_provider_timeout(raised.value)
        assert raised.value.__cause__ is not None

    @pytest.mark.parametrize("reply", [hang(), hang_after_headers(), drip(vectors(), 0.2)], ids=repr)
    def test_silence_is_this_kinds_own_timeout(self, reply, server, lane_server) -> None:
        server.next(reply)
        with pytest.raises(OpenAICompatibleRequestTimeout) as raised:
            embed(lane_server, "one", deadline_s=0.3)
        assert (raised.value.code, raised.value.calls) == (OPENAI_COMPATIBLE_REQUEST_TIMEOUT, 1)
        assert is_provider_timeout(raised.value)
        assert server.wait_until_ended(1).ended_by == "client_closed"

    def test_an_interactive_timeout_is_tried_twice_more(self, server, lane_server, monkeypatch) -> None:
        monkeypatch.setattr("embeddings.providers.retries.CONTENTION_PAUSE_S", 0.01)
        server.next(hang(), hang(), default())
        assert embed(lane_server, "one", deadline_s=0.3, is_interactive=True)[1].calls == 3
        server.next(hang(), hang(), hang())
        with pytest.raises(OpenAICompatibleRequestTimeout) as raised:
            embed(lane_server, "one", deadline_s=0.3, is_interactive=True)
        assert raised.value.calls == 3

    @pytest.mark.parametrize("code", [200, 400])
    def test_a_reply_without_end_is_cut_off(self, code, server, lane_server, monkeypatch) -> None:
        monkeypatch.setattr(http, "REPLY_BYTES_MAX", 100_000)
        server.script(lambda call: status(code, b"x" * 300_000))
        with pytest.raises(errors.ReplyRefused, match="over 100000 bytes"):
            embed(lane_server, "one")

    def test_our_own_loop_that_stood_still_is_not_the_servers_silence(self, server, lane_server, monkeypatch) -> None:
        monkeypatch.setattr(http, "LOOP_LAG_MAX_S", 0.2)
        server.next(hang())
        future = event_loop.submit(lane_server.embed(call_of(["one"], deadline_s=0.3)))
        server.wait_for_calls(1)
        event_loop.loop().call_soon_threadsafe(stand_still, 0.9)
        with pytest.raises(errors.OwnTimeout):
            future.result(10)


def stand_still(seconds: float) -> None:
    Event().wait(seconds)


class TestTransportErrors:
    """What the sockets do not do on request, by the classes that the client raises."""

    request = httpx2.Request("POST", "http://127.0.0.1/")

    def translated(self, error: Exception) -> Exception:
        return of_transport(error, 1.0, OpenAICompatibleRequestTimeout)

    def test_our_own_pool_is_no_provider_timeout(self) -> None:
        error = openai.APITimeoutError(request=self.request)
        error.__cause__ = httpx2.PoolTimeout("no connection free")
        assert type(self.translated(error)) is errors.OwnTimeout

    def test_the_operating_systems_timeout_keeps_its_name(self) -> None:
        error = httpx2.ConnectError("failed")
        error.__cause__ = TimeoutError(110, "Connection timed out")
        found = self.translated(error)
        assert isinstance(found, ProviderTimeoutError)
        assert found.code == ETIMEDOUT

    @pytest.mark.parametrize("kind", [httpx2.ReadTimeout, httpx2.WriteTimeout, httpx2.ConnectTimeout])
    def test_a_gap_that_ran_out(self, kind) -> None:
        assert isinstance(self.translated(kind("late")), OpenAICompatibleRequestTimeout)

    def test_a_cause_that_is_its_own_cause_ends(self) -> None:
        error = httpx2.ReadError("a")
        error.__cause__ = other = ValueError("b")
        other.__cause__ = error
        assert isinstance(self.translated(error), errors.ProviderUnreachable)


class TestRetryAfter:
    def ms(self, value: str | None) -> int | None:
        return retry_after_ms(httpx2.Headers({} if value is None else {"Retry-After": value}))

    def test_seconds(self) -> None:
        assert [self.ms(text) for text in ("0", "3", " 120 ")] == [0, 3_000, 120_000]

    def test_a_date(self) -> None:
        soon = datetime.now(UTC) + timedelta(seconds=60)
        assert self.ms(format_datetime(soon, usegmt=True)) == pytest.approx(60_000, abs=3_000)
        assert self.ms("Wed, 21 Oct 2015 07:28:00 GMT") == 0
        assert self.ms("Wed, 21 Oct 2015 07:28:00") == 0

    @pytest.mark.parametrize("text", [None, "", "soon", "-1", "1.5", "0x10", "Wed, 99 Oct 2015"])
    def test_what_makes_no_sense(self, text: str | None) -> None:
        assert self.ms(text) is None

    def test_a_number_of_any_length_is_read_within_bounds(self) -> None:
        assert self.ms("9" * 5_000) == 999_999_999_000


class TestRetryPolicy:
    @pytest.fixture
    def short_pauses(self) -> None:
        """The pauses as they are."""

    def test_a_model_that_loads(self) -> None:
        error = errors.ModelNotLoaded("x", status=503)
        assert [retry_pause_s(error, False, loads, 0) for loads in range(4)] == [0.5, 0.5, 0.5, None]

    @pytest.mark.parametrize("code", [408, 429, 503, 504])
    def test_contention_is_tried_again_for_an_interactive_text_alone(self, code: int) -> None:
        error = errors.UnexpectedStatus("x", status=code)
        assert [retry_pause_s(error, True, 0, tried) for tried in range(3)] == [1.0, 1.0, None]
        assert retry_pause_s(error, False, 0, 0) is None

    def test_a_timeout_likewise(self) -> None:
        assert retry_pause_s(ProviderTimeoutError("x"), True, 0, 0) == 1.0
        assert retry_pause_s(ProviderTimeoutError("x"), False, 0, 0) is None

    @pytest.mark.parametrize("error", [errors.OwnTimeout("x"), errors.ProviderUnreachable("x"), ValueError()], ids=repr)
    def test_nothing_else(self, error: Exception) -> None:
        assert retry_pause_s(error, True, 0, 0) is None


def test_nan_never_reaches_a_row(server, lane_server) -> None:
    server.next(vectors(lambda items: [{**item, "embedding": [math.nan] * 8} for item in items]))
    with pytest.raises(errors.ReplyNotFinite):
        embed(lane_server, "one")
