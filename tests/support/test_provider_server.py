"""The scripted server itself: what it logs, how it holds, cuts and ends calls, and that it leaves nothing behind."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from tests.support.provider_server import (
    DEFAULT_ANSWER,
    Gate,
    ProviderServer,
    T,
    close_without_answer,
    containing,
    default,
    delay,
    drip,
    gated,
    hang,
    hang_after_headers,
    json_reply,
    raw,
    reset,
    silence_forever,
    sse,
    status,
    truncate,
    unused_address,
    vector_of,
)
from tests.support.provider_server.log import CallLog
from tests.support.waiting import PROMPTLY_S, eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[ProviderServer]:
    with ProviderServer() as running:
        yield running


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False, timeout=5) as opened:
        yield opened


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def embed(client: httpx2.Client, server: ProviderServer, *texts: str, **fields: Any) -> httpx2.Response:
    return client.post(f"{server.openai_url}/embeddings", json={"model": "m", "input": list(texts), **fields})


def raw_call(server: ProviderServer, *texts: str) -> socket.socket:
    """A socket with a complete embedding request sent and nothing read."""
    body = json.dumps({"model": "m", "input": texts}).encode()
    opened = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    opened.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return opened


def everything(opened: socket.socket) -> bytes:
    return b"".join(iter(lambda: opened.recv(65536), b""))


class TestDialects:
    def test_openai_embeddings_in_base64_and_floats(self, server: ProviderServer, client: httpx2.Client) -> None:
        in_base64 = embed(client, server, "a", "b", encoding_format="base64").json()["data"]
        in_floats = embed(client, server, "a", "b").json()["data"]
        assert [item["index"] for item in in_base64] == [0, 1]
        for item, text in zip(in_base64, "ab", strict=True):
            assert np.array_equal(np.frombuffer(base64.b64decode(item["embedding"]), "<f4"), vector_of(text))
        for item, text in zip(in_floats, "ab", strict=True):
            assert np.array_equal(np.array(item["embedding"], np.float32), vector_of(text))

    def test_the_openai_client_embeds_chats_and_lists_models(self, server: ProviderServer) -> None:
        with openai.OpenAI(base_url=server.openai_url, api_key="key", max_retries=0) as sdk:
            vector = sdk.embeddings.create(input="a", model="m", dimensions=16).data[0].embedding
            messages: Any = [{"role": "user", "content": "why?"}]
            whole = sdk.chat.completions.create(model="m", messages=messages)
            with sdk.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            ) as stream:
                chunks = list(stream)
            models = [model.id for model in sdk.models.list()]
        assert np.allclose(vector, vector_of("a", 16))
        assert whole.choices[0].message.content == DEFAULT_ANSWER
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == DEFAULT_ANSWER
        assert chunks[-1].usage is not None
        assert models == list(server.defaults.models)
        assert [call.texts for call in server.chat_calls] == [("why?",), ("why?",)]

    def test_native_ollama(self, server: ProviderServer, client: httpx2.Client) -> None:
        reply = client.post(f"{server.address}/api/embed", json={"model": "m", "input": ["a", "b"]}).json()
        assert np.array_equal(np.array(reply["embeddings"], np.float32), [vector_of("a"), vector_of("b")])
        assert client.get(f"{server.address}/api/tags").json()["models"][0]["name"] in server.defaults.models
        assert client.get(f"{server.address}/api/version").json()["version"]

    def test_gemini_and_its_openai_endpoint(self, server: ProviderServer, client: httpx2.Client) -> None:
        requests = [{"model": "models/m", "content": {"parts": [{"text": text}]}} for text in "ab"]
        url = f"{server.gemini_url}/models/m:batchEmbedContents"
        native = client.post(url, json={"requests": requests}, params={"key": "k"}).json()["embeddings"]
        compatible = client.post(f"{server.gemini_url}/openai/embeddings", json={"model": "m", "input": "a"}).json()
        assert np.array_equal(np.array([item["values"] for item in native], np.float32)[1], vector_of("b"))
        assert np.allclose(compatible["data"][0]["embedding"], vector_of("a"))
        assert server.embedding_calls[0].texts == ("a", "b")
        assert server.embedding_calls[0].query == "key=k"

    def test_vectors_are_unit_length_and_tell_texts_apart(self) -> None:
        vectors = np.stack([vector_of(f"text {number}") for number in range(50)])
        products = vectors @ vectors.T
        assert vectors.dtype == np.float32
        assert np.allclose(np.diag(products), 1, atol=1e-5)
        assert np.abs(products - np.diag(np.diag(products))).max() < 0.4

    def test_an_unknown_path_is_404(self, server: ProviderServer, client: httpx2.Client) -> None:
        assert client.get(f"{server.address}/nothing").status_code == 404


class TestLog:
    def test_a_call_is_logged_before_it_is_answered(self, server: ProviderServer) -> None:
        server.next(hang())
        with raw_call(server, "a"):
            (call,) = server.wait_for_calls(1)
            assert (call.number, call.method, call.path, call.texts) == (1, "POST", "/v1/embeddings", ("a",))
            assert call.headers["host"] == "x"
            assert call.is_open
            assert server.in_flight == 1

    def test_a_replied_call_has_ended_before_its_client_can_go_on(
        self, server: ProviderServer, client: httpx2.Client
    ) -> None:
        for number in range(1, 101):
            embed(client, server, "a")
            assert server.calls[-1].ended_by == "replied"
            assert len(server.calls) == number
        assert server.peak_in_flight == 1
        assert server.connections_accepted == 1
        assert server.texts_seen == {"a": 100}

    @pytest.mark.parametrize(
        "reply", [hang(), hang_after_headers(), gated(Gate()), delay(60), drip(default(), 60), sse(silence_forever())]
    )
    def test_a_client_that_closes_is_noticed_at_once(self, server: ProviderServer, reply: Any) -> None:
        server.next(reply)
        opened = raw_call(server, "a")
        server.wait_for_calls(1)
        closed_at = time.monotonic()
        opened.close()
        call = server.wait_until_ended(1)
        assert call.ended_by == "client_closed"
        assert call.ended_at is not None
        assert call.ended_at - closed_at < PROMPTLY_S

    @pytest.mark.parametrize(("has_closed", "peak"), [(True, 1), (False, 2)])
    def test_a_dead_call_never_overlaps_the_next(self, has_closed: bool, peak: int) -> None:
        log = CallLog()
        fields: dict[str, Any] = {
            "method": "POST",
            "path": "/v1/embeddings",
            "headers": {},
            "body": None,
            "texts": ("a",),
        }
        first = log.begin(lambda: has_closed, **fields, kind="embedding")
        log.begin(lambda: False, **fields, kind="embedding")
        assert log.peak_in_flight == peak
        assert log.calls()[0].is_open is not has_closed
        log.end(first.number, "client_closed")
        assert log.in_flight == 1

    def test_a_caller_that_hangs_up_and_calls_again_is_one_in_flight(
        self, server: ProviderServer, client: httpx2.Client
    ) -> None:
        server.when(containing("a"), hang())
        for number in range(20):
            opened = raw_call(server, "a")
            server.wait_for_calls(2 * number + 1)
            opened.close()
            embed(client, server, "b")
        assert (server.in_flight, server.peak_in_flight) == (0, 1)

    def test_calls_that_are_open_together_are_counted(
        self, server: ProviderServer, threads: ThreadPoolExecutor, client: httpx2.Client
    ) -> None:
        gate = Gate()
        server.script(lambda call: gated(gate))
        waiting = [threads.submit(embed, client, server, str(number)) for number in range(3)]
        gate.wait_arrived(3)
        assert server.in_flight == 3
        gate.release()
        assert [each.result().status_code for each in waiting] == [200] * 3
        assert (server.in_flight, server.peak_in_flight) == (0, 3)

    def test_another_process_can_ask(self, server: ProviderServer, client: httpx2.Client) -> None:
        embed(client, server, "a", "b", "a")
        summary = client.get(f"{server.address}/__log__").json()
        assert (summary["calls"], summary["texts"], summary["distinct_texts"]) == (1, 3, 2)
        assert summary["ended_by"] == {"replied": 1}
        assert 0 < summary["busy_seconds"] <= summary["last_ended_at"] - summary["first_arrived_at"] + 1e-6
        assert client.delete(f"{server.address}/__log__").json()["calls"] == 0

    def test_waiting_in_vain_says_what_there_was(self, server: ProviderServer, client: httpx2.Client) -> None:
        embed(client, server, "a")
        with pytest.raises(AssertionError, match=r"1 POST /v1/embeddings replied"):
            server.wait_for_calls(2, timeout=0.01)


class TestScript:
    def test_rules_then_plan_then_queue_then_default(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(status(503), status(504))
        server.script(lambda call: status(429) if call.texts == ("planned",) else None)
        server.when(containing("alpha"), status(413), times=1)
        seen = [embed(client, server, text).status_code for text in ("alpha", "alpha", "planned", "x", "x")]
        assert seen == [413, 503, 429, 504, 200]

    def test_the_queue_is_not_spent_on_questions_about_models(
        self, server: ProviderServer, client: httpx2.Client
    ) -> None:
        server.next(status(503))
        assert client.get(f"{server.openai_url}/models").status_code == 200
        assert embed(client, server, "a").status_code == 503

    def test_a_cleared_script_leaves_the_default(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(status(503))
        server.when(lambda call: True, status(500))
        server.clear_script()
        assert embed(client, server, "a").status_code == 200

    def test_a_gate_lets_as_many_through_as_it_is_told(
        self, server: ProviderServer, threads: ThreadPoolExecutor, client: httpx2.Client
    ) -> None:
        gate = Gate()
        server.script(lambda call: gated(gate, json_reply({})))
        waiting = [threads.submit(embed, client, server, "a") for _ in range(2)]
        gate.wait_arrived(2)
        gate.release(1)
        eventually(lambda: sum(each.done() for each in waiting) == 1)
        assert server.in_flight == 1
        gate.release()
        assert all(each.result().status_code == 200 for each in waiting)


class TestWire:
    def test_close_reset_and_cut_differ_on_the_wire(self, server: ProviderServer) -> None:
        server.next(close_without_answer(), reset(), truncate(default(), 40), raw(b"HTTP/1.1 200 OK\r\n\r\nhi"))
        with raw_call(server, "a") as opened:
            assert everything(opened) == b""
        with raw_call(server, "a") as opened, pytest.raises(ConnectionResetError):
            everything(opened)
        with raw_call(server, "a") as opened:
            assert len(everything(opened)) == 40
        with raw_call(server, "a") as opened:
            assert everything(opened) == b"HTTP/1.1 200 OK\r\n\r\nhi"
        assert [call.ended_by for call in server.calls] == ["server_closed"] * 3 + ["replied"]

    def test_a_drip_leaves_byte_by_byte(self, server: ProviderServer, client: httpx2.Client) -> None:
        server.next(drip(json_reply({"a": 1}), interval=0.002, at_once=60))
        started = time.monotonic()
        assert embed(client, server, "a").json() == {"a": 1}
        assert time.monotonic() - started > 0.01
        assert server.calls[0].ended_by == "replied"

    def test_a_chunked_request_is_read(self, server: ProviderServer, client: httpx2.Client) -> None:
        parts = iter([b'{"model": "m", "in', b'put": ["a"]}'])
        assert client.post(f"{server.openai_url}/embeddings", content=parts).status_code == 200
        assert server.calls[0].texts == ("a",)

    def test_latency_counts_from_arrival(self, client: httpx2.Client) -> None:
        with ProviderServer(latency=0.03) as server:
            embed(client, server, "a")
            (call,) = server.calls
            assert call.ended_at is not None
            assert call.ended_at - call.arrived_at >= 0.03

    def test_a_server_that_accepts_and_never_reads(self, server: ProviderServer) -> None:
        server.accept_never()
        with raw_call(server, "a") as opened:
            eventually(lambda: server.open_connections == 1)
            opened.settimeout(0.05)
            with pytest.raises(TimeoutError):
                opened.recv(1)
        eventually(lambda: server.open_connections == 0)
        assert server.calls == []

    def test_nothing_listens_at_an_unused_address(self, client: httpx2.Client) -> None:
        with pytest.raises(httpx2.ConnectError):
            client.get(unused_address())


class TestEnd:
    def test_stopping_cuts_every_open_call_and_leaves_no_thread(self, threads: ThreadPoolExecutor) -> None:
        before = set(threading.enumerate())
        with ProviderServer() as server:
            server.next(hang(), gated(Gate()), drip(default(), 60), sse(T("x"), silence_forever()))
            opened = [raw_call(server, "a") for _ in range(4)]
            idle = socket.create_connection(("127.0.0.1", server.port))
            server.wait_for_calls(4)
            eventually(lambda: server.connections_accepted == 5)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        assert {call.ended_by for call in server.calls} == {"server_closed"}
        assert set(threading.enumerate()) <= before
        for each in (*opened, idle):
            each.close()

    def test_stopping_does_not_wait_for_a_client_that_reads_nothing(self) -> None:
        with ProviderServer() as server:
            server.next(raw(b"x" * 16_000_000))
            opened = raw_call(server, "a")
            server.wait_for_calls(1)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        opened.close()

    def test_a_port_can_be_listened_on_again(self, client: httpx2.Client) -> None:
        with ProviderServer() as first:
            embed(client, first, "a")
        with ProviderServer(port=first.port) as second:
            assert embed(client, second, "a").status_code == 200

    def test_as_a_process_it_prints_its_address_and_ends_on_sigterm(
        self, client: httpx2.Client, threads: ThreadPoolExecutor
    ) -> None:
        command = [sys.executable, "-m", "tests.support.provider_server", "--dimensions", "8", "--chat-chunks", "3"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            reply = client.post(f"{address}/v1/embeddings", json={"model": "m", "input": "a"}).json()
            chat: Future[httpx2.Response] = threads.submit(
                client.post, f"{address}/v1/chat/completions", json={"messages": [], "stream": True}
            )
            assert chat.result().text.count("word") == 3
            assert client.get(f"{address}/__log__").json()["embedding_calls"] == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
        assert len(reply["data"][0]["embedding"]) == 8
