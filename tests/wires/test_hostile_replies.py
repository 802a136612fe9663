"""Replies of model servers that are odd in what surrounds the answer: encodings, charsets, headers, kept connections."""

import gzip
import json
import socket
import threading

import pytest

from embeddings import errors
from embeddings.providers import http
from embeddings.providers.gemini import GeminiProvider
from embeddings.providers.http import KEPT_CONNECTIONS
from embeddings.providers.http_base import retry_after_ms
from embeddings.providers.ollama import OllamaProvider
from embeddings.providers.openai_compatible import OpenAICompatibleProvider
from tests.support.attempts import play
from tests.support.bare_server import bare_server
from tests.support.calling import adapter, embed, provider_at
from tests.support.provider_server import ProviderServer, raw, status
from tests.support.sweeps import GEMINI, KEY, OLLAMA, OPENAI

KINDS = {OPENAI: OpenAICompatibleProvider, OLLAMA: OllamaProvider, GEMINI: GeminiProvider}
BODIES = {
    OPENAI: {"data": [{"index": 0, "embedding": [1.0, 2.0]}]},
    OLLAMA: {"embeddings": [[1.0, 2.0]]},
    GEMINI: {"embeddings": [{"values": [1.0, 2.0]}]},
}
GOOD = json.dumps(BODIES[OPENAI]).encode()


@pytest.fixture
def server():
    with ProviderServer(dimensions=2) as running:
        yield running


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    return request.param


@pytest.fixture
def made(server, kind, monkeypatch):
    monkeypatch.setenv(KEY, "sesame")
    with adapter(KINDS[kind], provider_at(server.address, kind)) as at_server:
        yield at_server


def reply(body, headers=b"", line=b"HTTP/1.1 200 OK\r\n"):
    return raw(line + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def good(kind):
    return json.dumps(BODIES[kind]).encode()


class TestEncodings:
    def test_an_encoding_that_was_requested_is_decoded(self, server, made, kind):
        server.next(reply(gzip.compress(good(kind)), b"Content-Encoding: gzip\r\n"))
        assert embed(made, "one")[0].tolist() == [[1.0, 2.0]]
        assert server.calls[0].headers["accept-encoding"] == "gzip, deflate"

    def test_a_compressed_body_is_bounded_as_decoded(self, server, made, monkeypatch):
        monkeypatch.setattr(http, "REPLY_BYTES_MAX", 1_000_000)
        server.next(reply(gzip.compress(b" " * 20_000_000), b"Content-Encoding: gzip\r\n"))
        with pytest.raises(errors.ReplyRefused, match="over 1000000 bytes"):
            embed(made, "one")

    @pytest.mark.parametrize("named", [b"gzip", b"br", b"zstd", b"rot13", b"gzip, br"])
    def test_an_unknown_or_unrequested_encoding_is_named(self, server, made, kind, named):
        server.next(reply(good(kind), b"Content-Encoding: " + named + b"\r\n"))
        with pytest.raises(errors.ReplyRefused, match="content encoding"):
            embed(made, "one")

    @pytest.mark.parametrize("named", [b"gzip", b"br"])
    def test_a_broken_encoding_does_not_hide_an_error_status(self, server, made, named):
        server.next(reply(b"later", b"Retry-After: 3\r\nContent-Encoding: " + named + b"\r\n", b"HTTP/1.1 429 No\r\n"))
        with pytest.raises(errors.ProviderBusy) as busy:
            embed(made, "one")
        assert busy.value.retry_after_ms == 3_000


class TestMalformedErrors:
    @pytest.mark.parametrize("charset", ["hex", "base64", "idna", "undefined", "punycode", "utf-16", "none-such"])
    def test_an_invalid_charset(self, server, made, charset):
        server.next(status(429, b"later\xff", content_type=f"text/plain; charset={charset}"))
        with pytest.raises(errors.ProviderBusy, match="later"):
            embed(made, "one")

    def test_json_that_is_too_deep_to_read(self, server, made):
        server.next(status(429, b"[" * 100_000))
        with pytest.raises(errors.ProviderBusy):
            embed(made, "one")

    @pytest.mark.parametrize("details", [5, "x", {"reason": 1}, [{"reason": ["API_KEY_INVALID"]}, None]])
    def test_error_details_of_another_type(self, server, made, details):
        server.next(status(429, {"error": {"message": "later", "details": details}}))
        with pytest.raises(errors.ProviderBusy, match="later"):
            embed(made, "one")

    def test_a_header_of_any_bytes(self, server, made, kind):
        server.next(reply(good(kind), b"X-Odd: \xff\xfe\r\n"))
        assert embed(made, "one")[0].tolist() == [[1.0, 2.0]]

    def test_a_header_of_any_bytes_on_an_error_of_chat(self, server):
        assert play(server, reply(b"later", b"X-Odd: \xff\xfe\r\n", b"HTTP/1.1 429 No\r\n")).end == (
            "provider_error",
            "status",
        )

    @pytest.mark.parametrize(
        "wish", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 01 Jan 2026 99999999999:00:00 GMT"]
    )
    def test_a_retry_after_out_of_range(self, server, made, wish):
        assert retry_after_ms({"retry-after": wish}) is None
        server.next(status(429, headers={"Retry-After": wish}))
        with pytest.raises(errors.ProviderBusy) as busy:
            embed(made, "one")
        assert busy.value.retry_after_ms is None


class TestAKeptAliveConnection:
    """A server closes a connection that it kept at the moment in which it is used again."""

    def test_the_request_is_sent_again_on_another_and_counted(self):
        asked = []
        with answering_once(asked) as there, adapter(OpenAICompatibleProvider, provider_at(there, OPENAI)) as made:
            assert embed(made, "one")[1].calls == 1
            assert embed(made, "two")[1].calls == 2
        assert len(asked) == 3

    def test_a_new_one_that_is_closed_without_an_answer_is_not_tried_again(self, server):
        server.script(lambda call: raw(b"\r\n"))
        asked = provider_at(server.address, OPENAI)
        with adapter(OpenAICompatibleProvider, asked) as made, pytest.raises(errors.ProviderUnreachable) as gone:
            embed(made, "one")
        assert (gone.value.calls, len(server.calls)) == (1, 1)

    def test_a_reply_that_is_cut_is_not_requested_again(self):
        cut = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"
        asked = []
        with (
            answering_once(asked, then=cut) as there,
            adapter(OpenAICompatibleProvider, provider_at(there, OPENAI)) as made,
        ):
            embed(made, "one")
            with pytest.raises(errors.ProviderUnreachable) as gone:
                embed(made, "two")
        assert (gone.value.calls, len(asked)) == (1, 2)

    def test_it_is_tried_again_as_often_as_connections_are_kept_and_no_more(self, made, monkeypatch):
        async def lost(call):
            raise errors.KeptConnectionLost("gone")

        monkeypatch.setattr(made, "_request", lambda call, *texts: lost(call))
        with pytest.raises(errors.ProviderUnreachable) as gone:
            embed(made, "one")
        assert gone.value.calls == KEPT_CONNECTIONS + 1
        assert gone.value.code == "PROVIDER_UNREACHABLE"


def answering_once(asked, then=b""):
    """A server that answers the first request of each connection, and the second with `then` and a FIN."""

    def converse(connection):
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD
        for said in (answer, then):
            if not read_request(connection):
                break
            asked.append(connection)
            connection.sendall(said)
        connection.close()

    def hand_over(connection):
        mine = socket.socket(fileno=connection.detach())
        threading.Thread(target=converse, args=(mine,), daemon=True).start()

    return bare_server(hand_over)


def read_request(connection):
    """Whether a whole request came."""
    received = b""
    while b"\r\n\r\n" not in received or not received.endswith(b"}"):
        part = connection.recv(65_536)
        if not part:
            return False
        received += part
    return True
