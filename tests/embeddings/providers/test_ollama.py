"""Native Ollama's adapter, call by call: what leaves, and which typed error comes of which answer."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings import errors
from embeddings.providers import retries
from embeddings.providers.ollama import OllamaProvider
from embeddings.providers.openai_compatible import OpenAICompatibleProvider
from embeddings.registry import set_provider
from embeddings.timeouts import PROVIDER_TIMEOUT, ProviderTimeoutError, is_provider_timeout
from project.runtime import event_loop
from tests.support.calling import adapter, call_of, embed, only_call, provider_at
from tests.support.provider_server import (
    Gate,
    ProviderServer,
    drip,
    gated,
    hang,
    hang_after_headers,
    json_reply,
    reset,
    status,
    unused_address,
    vector_of,
    vectors,
)
from tests.support.sweeps import KEY, OLLAMA, OPENAI
from tests.support.waiting import PROMPTLY_S, eventually


@pytest.fixture
def server():
    with ProviderServer(dimensions=8) as running:
        yield running


@pytest.fixture
def ollama(server):
    with adapter(OllamaProvider, provider_at(server.address, OLLAMA)) as made:
        yield made


class TestWhatLeaves:
    def test_the_texts_in_order_never_truncated(self, server, ollama) -> None:
        found, reply = embed(ollama, "one", "two")
        call = only_call(server)
        assert (call.method, call.path) == ("POST", "/api/embed")
        assert call.body == {"model": "embed", "input": ["one", "two"], "truncate": False}
        assert np.allclose(found, [vector_of("one", 8), vector_of("two", 8)])
        assert reply.calls == 1

    def test_no_key_unless_one_is_named(self, server, ollama, monkeypatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "not-for-you")
        monkeypatch.setenv("OLLAMA_API_KEY", "not-for-you")
        embed(ollama, "one")
        assert "authorization" not in only_call(server).headers

    def test_the_named_key(self, server, monkeypatch) -> None:
        monkeypatch.setenv(KEY, "sesame")
        with adapter(OllamaProvider, provider_at(server.address, OLLAMA, api_key_env=KEY)) as made:
            embed(made, "one")
        assert only_call(server).headers["authorization"] == "Bearer sesame"

    def test_a_named_key_that_is_not_set(self, server) -> None:
        with pytest.raises(errors.ProviderConfigurationError, match=KEY):
            OllamaProvider(provider_at(server.address, OLLAMA, api_key_env=KEY))

    def test_no_proxy_of_the_environment(self, server, ollama, monkeypatch) -> None:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, unused_address())
        with adapter(OllamaProvider, provider_at(server.address, OLLAMA)) as made:
            assert embed(made, "one")[1].calls == 1

    def test_departure_is_told(self, ollama) -> None:
        call = call_of(["one"])
        event_loop.run(ollama.embed(call))
        assert call.left.is_set()


ANSWERS = [
    (status(400, {"error": "the input length exceeds the context length"}), errors.TextRefused, 1),
    (status(500, {"error": "boom"}), errors.ServerFailed, 1),
    (status(404, {"error": 'model "embed" not found, try pulling it first'}), errors.ModelNotLoaded, 4),
    (status(500, {"error": "model failed to load, this may be due to resource limitations"}), errors.ModelNotLoaded, 4),
    (status(401, {"error": "unauthorized"}), errors.ProviderUnauthorized, 1),
    (status(403), errors.ProviderUnauthorized, 1),
    (status(429), errors.ProviderBusy, 1),
    (
        status(503, {"error": "server busy, please try again.  maximum pending requests exceeded"}),
        errors.ProviderBusy,
        1,
    ),
    (status(307, headers={"Location": "http://127.0.0.1:9/"}), errors.UnexpectedStatus, 1),
    (status(502, b"<html>bad gateway</html>"), errors.UnexpectedStatus, 1),
    (reset(), errors.ProviderUnreachable, 1),
]


class TestAnswers:
    @pytest.mark.parametrize(
        ("reply", "kind", "calls"), ANSWERS, ids=lambda value: getattr(value, "__name__", repr(value))
    )
    def test_each_has_its_typed_error_and_its_count(self, reply, kind, calls, server, ollama) -> None:
        server.script(lambda call: reply)
        with pytest.raises(errors.ProviderError) as raised:
            embed(ollama, "one")
        assert type(raised.value) is kind
        assert raised.value.calls == calls == len(server.calls)
        assert not is_provider_timeout(raised.value)

    def test_its_own_words_are_kept_bounded_and_without_the_key(self, server, monkeypatch) -> None:
        monkeypatch.setenv(KEY, "sesame")
        server.next(status(400, {"error": "sesame is no key\n" + "x" * 5_000}))
        refused = pytest.raises(errors.TextRefused, match=r"\*\*\* is no key x+")
        with adapter(OllamaProvider, provider_at(server.address, OLLAMA, api_key_env=KEY)) as made, refused as raised:
            embed(made, "one")
        assert len(str(raised.value)) < 400

    def test_nothing_listens(self) -> None:
        with (
            adapter(OllamaProvider, provider_at(unused_address(), OLLAMA)) as made,
            pytest.raises(errors.ProviderUnreachable),
        ):
            embed(made, "one")

    @pytest.mark.parametrize("reply", [hang(), hang_after_headers(), drip(vectors(), 0.2)], ids=repr)
    def test_silence_is_a_provider_timeout(self, reply, server, ollama) -> None:
        server.next(reply)
        with pytest.raises(ProviderTimeoutError) as raised:
            embed(ollama, "one", deadline_s=0.3)
        assert (raised.value.code, raised.value.calls) == (PROVIDER_TIMEOUT, 1)
        assert server.wait_until_ended(1).ended_by == "client_closed"

    @pytest.mark.parametrize(
        "body", [{"embeddings": None}, {"embedding": [1.0]}, [], {"embeddings": [1.0]}, {"embeddings": [{}]}], ids=repr
    )
    def test_what_is_no_embedding_reply(self, body, server, ollama) -> None:
        server.next(json_reply(body))
        with pytest.raises(errors.ReplyRefused):
            embed(ollama, "one")


class TestInteractiveRetries:
    def test_contention_twice(self, server, ollama) -> None:
        server.next(status(429), status(504))
        assert embed(ollama, "one", is_interactive=True)[1].calls == 3

    def test_a_batch_is_not_tried_again(self, server, ollama) -> None:
        server.next(status(504))
        with pytest.raises(errors.UnexpectedStatus):
            embed(ollama, "one")
        assert len(server.calls) == 1


class TestItsConnections:
    def test_a_changed_configuration_breaks_no_call_off(self, server) -> None:
        gate = Gate()
        server.next(gated(gate))
        made = OllamaProvider(provider_at(server.address, OLLAMA))
        call = event_loop.submit(made.embed(call_of(["one"])))
        gate.wait_arrived()
        retired = event_loop.submit(made.retire())
        assert not retired.done()
        gate.release()
        assert call.result(5).calls == 1
        retired.result(5)
        eventually(lambda: server.open_connections == 0)

    @pytest.mark.parametrize("made", [OllamaProvider, OpenAICompatibleProvider])
    def test_a_call_that_leaves_after_the_change_is_made_and_keeps_no_connection(self, server, made) -> None:
        """Its thread fetched the adapter before the configuration changed, and sends the call after."""
        kind = OLLAMA if made is OllamaProvider else OPENAI
        late = made(provider_at(server.address, kind))
        embed(late, "before")
        event_loop.run(late.retire())
        eventually(lambda: server.open_connections == 0)
        assert embed(late, "after")[1].calls == 1
        eventually(lambda: server.open_connections == 0)

    def test_a_call_that_pauses_between_two_attempts_is_tried_again_after_the_change(self, server, monkeypatch) -> None:
        made = OllamaProvider(provider_at(server.address, OLLAMA))
        monkeypatch.setattr(retries, "MODEL_LOAD_PAUSE_S", 0.5)
        server.next(status(404))
        call = event_loop.submit(made.embed(call_of(["one"])))
        server.wait_until_ended(1)
        event_loop.run(made.retire())
        assert call.result(PROMPTLY_S).calls == 2


@pytest.mark.django_db
class TestTheBaseUrl:
    @pytest.mark.parametrize(("kind", "path"), [("ollama", "/v1"), ("gemini", "/v1beta/openai/")])
    def test_is_the_servers_own_root(self, kind: str, path: str) -> None:
        values = {"kind": kind, "base_url": f"http://127.0.0.1:11434{path}", "embedding_model": "embed"}
        with pytest.raises(errors.UsageError, match="own root"):
            set_provider("tried", values)

    def test_an_openai_compatible_one_ends_as_it_likes(self) -> None:
        made = set_provider("tried", {"base_url": "http://127.0.0.1:11434/v1", "embedding_model": "embed"})
        assert made.provider.base_url.endswith("/v1")


class TestHealth:
    def test_version_and_models(self, server, ollama) -> None:
        assert event_loop.run(ollama.version())
        assert "scripted-embedding" in event_loop.run(ollama.model_names())
        assert [call.path for call in server.calls] == ["/api/version", "/api/tags"]

    def test_something_else_answers(self, server, ollama) -> None:
        server.script(lambda call: status(200, b"<html>"))
        with pytest.raises(errors.ReplyRefused):
            event_loop.run(ollama.version())

    def test_a_refusal(self, server, ollama) -> None:
        server.script(lambda call: status(401))
        with pytest.raises(errors.ProviderUnauthorized):
            event_loop.run(ollama.model_names())
