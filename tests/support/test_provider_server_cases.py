"""Every observed server fault can be played: what each recipe puts on the wire, read by a client that knows no SSE."""

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.support.provider_server import (
    A,
    D,
    F,
    ProviderServer,
    R,
    Reply,
    T,
    U,
    Z,
    as_strings,
    block,
    bom,
    bytewise,
    comment,
    data,
    drip,
    dropped,
    endless_line,
    event,
    fin,
    fin_inside_chunk,
    finish,
    forever,
    framed,
    hang,
    indexed,
    packets,
    reordered,
    repeat,
    rst,
    silence,
    silence_forever,
    split,
    sse,
    status,
    unterminated,
    vector_of,
    vectors,
    with_id,
    with_number,
    without_index,
    wrong_dimensions,
)

TICK = silence(0.005)


@pytest.fixture
def server() -> Iterator[ProviderServer]:
    with ProviderServer() as running:
        yield running


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False, timeout=0.1) as opened:
        yield opened


def read_stream(client: httpx2.Client, server: ProviderServer, limit: int = 1 << 16) -> tuple[bytes, str]:
    """The bytes of a chat stream, and how it ended: "whole", "left" (at `limit` bytes), or the error's class name."""
    seen, url = b"", f"{server.openai_url}/chat/completions"
    try:
        with client.stream("POST", url, json={"model": "m", "messages": [], "stream": True}) as reply:
            for part in reply.iter_raw():
                seen += part
                if len(seen) >= limit:
                    return seen, "left"
    except (httpx2.TimeoutException, httpx2.TransportError) as error:
        return seen, type(error).__name__
    return seen, "whole"


def embed(client: httpx2.Client, server: ProviderServer, **fields: Any) -> Any:
    reply = client.post(f"{server.openai_url}/embeddings", json={"model": "m", "input": ["a", "b", "c"], **fields})
    return json.loads(reply.content)["data"]


ENDING_WHOLE = {
    "3 role-only, then an answer": (sse(R, TICK, T("x"), F, D), b"[DONE]"),
    "6 many argument deltas": (sse(R, repeat(200, A("1")), finish("tool_calls"), D), b'"arguments":"1"'),
    "13 heartbeats of every kind": (sse(R, event("ping", "{}"), block("id: 1"), block("retry: 1000"), D), b"id: 1\n\n"),
    "19 a clean end with no finish": (sse(R, T("x")), b'"content":"x"'),
    "21 no finish reason": (sse(R, T("x"), D), b"[DONE]"),
    "22 usage alone": (sse(U, D), b'"choices":[]'),
    "25 usage": (sse(R, T("x"), F, U, D), b'"total_tokens":12'),
    "27 ids and comments": (sse(with_id("7", T("x")), comment("ping"), D), b": ping\n\n"),
    "29 empty data": (sse(R, block("data:"), D), b"data:\n\n"),
    "30 comments before data": (sse(repeat(3, comment("PROCESSING")), R, T("x"), F, D), b": PROCESSING"),
    "31 an error frame": (sse(data({"error": {"message": "no", "code": "x"}})), b'{"error":'),
    "32 a named error": (sse(event("error", {"message": "no"})), b"event: error\n"),
    "33 an error as finish reason": (sse(R, finish("error_finish", content="boom")), b'"error_finish"'),
    "35 empty arguments twice": (sse(R, A("", id="c", name="f"), A(""), finish("tool_calls"), D), b'"id":"c"'),
    "36 malformed JSON": (sse(R, T("x"), data("{oops"), T("y"), D), b"data: {oops\n\n"),
    "40 CRLF": (sse(framed(R), framed(T("x")), framed(D)), b"\r\n\r\n"),
    "40 CR": (sse(framed(T("x"), "\r"), framed(D, "\r")), b"[DONE]\r\r"),
    "40 CR and LF in different packets": (sse(bytewise(framed(T("x"))), D), b'"content":"x"'),
    "41 a split character": (sse(bytewise(T("é€𝄞"))), "é€𝄞".encode()),
    "41 invalid UTF-8": (sse(data(b'{"a": "\xff\xfe"}'), D), b"\xff\xfe"),
    "43 no blank line at the end": (sse(R, unterminated(T("x"))), b"}]}\n"),
    "a byte order mark": (sse(bom(), T("x"), D), b"\xef\xbb\xbfdata:"),
    "38 a web page": (status(200, "<html>", content_type="text/html"), b"<html>"),
}

NEVER_ENDING = {
    "1 a head and silence": (sse(silence_forever()), b""),
    "2 nothing": (hang(), b""),
    "5 silence in the arguments": (sse(R, repeat(5, T("x")), A(""), silence_forever()), b'"arguments":""'),
    "15 silence after text": (sse(R, T("x"), silence_forever()), b'"content":"x"'),
    "23 silence after the finish": (sse(R, T("x"), F, silence_forever()), b'"stop"'),
    "23 silence after the end mark": (sse(R, T("x"), F, D, silence_forever()), b"[DONE]"),
}

FLOWING_FOREVER = {
    "8 reasoning": (sse(R, forever(Z("hm"), TICK)), b'"reasoning_content":"hm"'),
    "9 text just in time": (sse(R, forever(T("x"), TICK)), b'"content":"x"'),
    "11 comments": (sse(R, T("x"), forever(comment(), TICK)), b": ping\n\n"),
    "42 an endless line": (sse(R, endless_line()), b"data: xxx"),
}

CUT_SHORT = {
    "46 FIN before the terminating chunk": (sse(R, T("x"), fin()), "RemoteProtocolError"),
    "46 FIN inside a chunk": (sse(R, T("x"), fin_inside_chunk()), "RemoteProtocolError"),
    "46 RST": (sse(R, T("x"), TICK, rst()), "ReadError"),
}


class TestChatStreams:
    @pytest.mark.parametrize(("reply", "part"), ENDING_WHOLE.values(), ids=ENDING_WHOLE)
    def test_ends_whole(self, server: ProviderServer, client: httpx2.Client, reply: Reply, part: bytes) -> None:
        server.next(reply)
        seen, end = read_stream(client, server)
        assert end == "whole"
        assert part in seen
        assert server.wait_until_ended(1).ended_by == "replied"

    @pytest.mark.parametrize(("reply", "part"), NEVER_ENDING.values(), ids=NEVER_ENDING)
    def test_falls_silent(self, server: ProviderServer, client: httpx2.Client, reply: Reply, part: bytes) -> None:
        server.next(reply)
        seen, end = read_stream(client, server)
        assert end == "ReadTimeout"
        assert part in seen
        assert server.wait_until_ended(1).ended_by == "client_closed"

    @pytest.mark.parametrize(("reply", "part"), FLOWING_FOREVER.values(), ids=FLOWING_FOREVER)
    def test_flows_for_ever(self, server: ProviderServer, client: httpx2.Client, reply: Reply, part: bytes) -> None:
        server.next(reply)
        seen, end = read_stream(client, server, limit=1000)
        assert end == "left"
        assert part in seen
        assert server.wait_until_ended(1).ended_by == "client_closed"

    @pytest.mark.parametrize(("reply", "error"), CUT_SHORT.values(), ids=CUT_SHORT)
    def test_is_cut(self, server: ProviderServer, client: httpx2.Client, reply: Reply, error: str) -> None:
        server.next(reply)
        assert read_stream(client, server)[1] == error
        assert server.wait_until_ended(1).ended_by == "server_closed"

    def test_42_a_line_of_eight_megabytes(self, server: ProviderServer) -> None:
        server.next(sse(T("x" * 8_000_000), D))
        with httpx2.Client(trust_env=False, timeout=5) as patient:
            seen, end = read_stream(patient, server, limit=1 << 24)
        assert (end, len(seen) > 8_000_000) == ("whole", True)

    def test_51_each_attempt_has_a_wire_of_its_own(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(sse(R, T("Hello wo"), silence_forever()), sse(R, T("Hello world"), F, D))
        ends = [read_stream(client, server)[1] for _ in range(2)]
        assert ends == ["ReadTimeout", "whole"]

    def test_split_and_packets_arrive_apart(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(sse(split(T("x"), 3, 9), packets(b"data: [DONE]\n", b"\n")))
        url = f"{server.openai_url}/chat/completions"
        with client.stream("POST", url, json={"messages": [], "stream": True}) as reply:
            parts = list(reply.iter_raw())
        assert [len(part) for part in parts[:2]] == [3, 6]
        assert parts[-2:] == [b"data: [DONE]\n", b"\n"]


class TestEmbeddingReplies:
    def test_19_a_vector_too_few(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(vectors(dropped(1)))
        assert [item["index"] for item in embed(client, server)] == [0, 2]

    @pytest.mark.parametrize("encoding", ["float", "base64"])
    def test_20_another_order(self, server: ProviderServer, client: httpx2.Client, encoding: str) -> None:
        server.next(vectors(reordered([2, 0, 1])))
        items = embed(client, server, encoding_format=encoding)
        assert [item["index"] for item in items] == [2, 0, 1]
        assert np.array_equal(decoded(items[0]), vector_of("c"))

    @pytest.mark.parametrize("indices", [(0, 0, 1), (0, 1, 3), (0, 1, -1), (0, 1, "2"), (0, 1, None)])
    def test_20_wrong_indices(self, server: ProviderServer, client: httpx2.Client, indices: tuple[Any, ...]) -> None:
        server.next(vectors(indexed(*indices)))
        assert tuple(item["index"] for item in embed(client, server)) == indices

    def test_20_no_index(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(vectors(without_index))
        assert [set(item) for item in embed(client, server)] == [{"object", "embedding"}] * 3

    def test_22_other_dimensions(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(wrong_dimensions(1024))
        assert {len(item["embedding"]) for item in embed(client, server)} == {1024}

    @pytest.mark.parametrize("encoding", ["float", "base64"])
    @pytest.mark.parametrize("number", [math.nan, math.inf])
    def test_24a_a_number_that_is_not_finite(
        self, server: ProviderServer, client: httpx2.Client, number: float, encoding: str
    ) -> None:
        server.next(vectors(with_number(number, at=1, place=5)))
        items = embed(client, server, encoding_format=encoding)
        assert not np.isfinite(decoded(items[1])[5])
        assert np.isfinite(decoded(items[0])).all()

    def test_24a_a_null_and_25_numbers_as_strings(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(vectors(with_number(None, at=2)), vectors(as_strings))
        assert embed(client, server, encoding_format="base64")[2]["embedding"][0] is None
        assert np.array_equal(np.array(embed(client, server)[0]["embedding"], np.float32), vector_of("a"))

    def test_25_base64_not_answered_or_not_asked(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(vectors(encoding="float"), vectors(encoding="base64"), vectors(lambda items: []))
        assert isinstance(embed(client, server, encoding_format="base64")[0]["embedding"], list)
        assert isinstance(embed(client, server)[0]["embedding"], str)
        assert embed(client, server) == []

    def test_the_other_dialects_are_altered_alike(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(vectors(dropped(0)), vectors(dropped(0)))
        ollama = client.post(f"{server.address}/api/embed", json={"model": "m", "input": ["a", "b"]}).json()
        requests = [{"content": {"parts": [{"text": text}]}} for text in "ab"]
        gemini = client.post(f"{server.gemini_url}/models/m:batchEmbedContents", json={"requests": requests}).json()
        assert np.array_equal(np.array(ollama["embeddings"], np.float32), [vector_of("b")])
        assert np.array_equal(np.array(gemini["embeddings"][0]["values"], np.float32), vector_of("b"))

    def test_12_and_35_refusals_with_their_headers(self, server: ProviderServer, client: httpx2.Client) -> None:
        loading = {"error": {"message": "Loading model", "code": 503}}
        server.next(status(429, headers={"Retry-After": "3"}), status(503, loading))
        url, body = f"{server.openai_url}/embeddings", {"model": "m", "input": "a"}
        first, second = client.post(url, json=body), client.post(url, json=body)
        assert (first.status_code, first.headers["Retry-After"]) == (429, "3")
        assert (second.status_code, second.json()) == (503, loading)

    def test_18_a_drip_outlives_a_read_timeout(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(drip(vectors(), interval=0.01, at_once=80))
        with client.stream("POST", f"{server.openai_url}/embeddings", json={"model": "m", "input": "a"}) as reply:
            parts = reply.iter_raw()
            seen = b"".join(next(parts) for _ in range(20))
        assert seen.startswith(b'{"object"')
        assert server.wait_until_ended(1).ended_by == "client_closed"


def decoded(item: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    vector = item["embedding"]
    if isinstance(vector, str):
        return np.frombuffer(base64.b64decode(vector), "<f4")
    return np.array(vector, np.float32)
