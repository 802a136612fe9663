"""Gemini's adapter, call by call, and what its lack of a gate means for a run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embeddings import codes, errors
from embeddings.dispatch import admission
from embeddings.models import EmbeddingTask
from embeddings.providers import gemini
from embeddings.providers.gemini import GeminiProvider
from embeddings.runs import sweep
from embeddings.timeouts import PROVIDER_TIMEOUT, ProviderTimeoutError
from tests.support.calling import adapter, embed, only_call, provider_at
from tests.support.commanding import manage
from tests.support.provider_server import (
    Gate,
    ProviderServer,
    containing,
    dropped,
    gated,
    hang,
    json_reply,
    status,
    vector_of,
    vectors,
    with_number,
)
from tests.support.sweeps import GEMINI, KEY, all_codes, make_site, outcome_of, stored, texts
from tests.support.threads import in_threads


@pytest.fixture
def server():
    with ProviderServer(dimensions=8) as running:
        yield running


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv(KEY, "sesame")


@pytest.fixture
def remote(server):
    with adapter(GeminiProvider, provider_at(server.address, GEMINI)) as made:
        yield made


class TestWhatLeaves:
    def test_each_text_is_a_content_of_its_own(self, server, remote) -> None:
        found, _ = embed(remote, "one", "two")
        call = only_call(server)
        assert call.path == "/v1beta/models/embed:batchEmbedContents"
        assert call.headers["x-goog-api-key"] == "sesame"
        assert call.query == ""
        assert call.body == {
            "requests": [{"model": "models/embed", "content": {"parts": [{"text": text}]}} for text in ("one", "two")]
        }
        assert np.allclose(found, [vector_of("one", 8), vector_of("two", 8)])

    def test_a_models_name_with_its_folder(self, server, remote) -> None:
        embed(remote, "one", model="models/embed")
        assert only_call(server).path == "/v1beta/models/embed:batchEmbedContents"

    def test_a_hundred_texts_a_request(self, server, remote) -> None:
        many = [f"text {number}" for number in range(250)]
        found, reply = embed(remote, *many)
        assert [len(call.texts) for call in server.calls] == [100, 100, 50]
        assert reply.calls == 3
        assert np.allclose(found, [vector_of(text, 8) for text in many])

    def test_a_failure_counts_the_requests_before_it(self, server, remote) -> None:
        server.next(vectors(), status(400))
        with pytest.raises(errors.TextRefused) as raised:
            embed(remote, *map(str, range(150)))
        assert raised.value.calls == 2


class TestTheKey:
    def test_a_variable_that_is_not_set_is_named(self, server, monkeypatch) -> None:
        monkeypatch.delenv(KEY)
        with pytest.raises(errors.ProviderConfigurationError, match=KEY):
            GeminiProvider(provider_at(server.address, GEMINI))

    def test_no_variable_at_all_is_told_how_to_name_one(self, server) -> None:
        with pytest.raises(errors.ProviderConfigurationError, match="--api-key-env"):
            GeminiProvider(provider_at(server.address, GEMINI, api_key_env=""))

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.both_databases
    def test_a_sweep_without_it_fails_by_name_and_calls_nobody(self, server, tmp_path, monkeypatch) -> None:
        monkeypatch.delenv(KEY)
        site = make_site(GEMINI, server, tmp_path)
        repository = site.repository("a", *texts("alpha", 3))
        outcome = outcome_of(site.swept(repository), repository)
        assert (outcome.status, outcome.source_error_code) == ("failed", "PROVIDER_CONFIGURATION")
        assert (KEY in outcome.error_detail, outcome.provider_calls) == (True, 0)
        assert server.calls == []

    def test_it_is_never_repeated(self, server, remote) -> None:
        server.next(status(502, b"your key sesame was seen"))
        with pytest.raises(errors.UnexpectedStatus) as raised:
            embed(remote, "one")
        assert "sesame" not in str(raised.value)


class TestAnswers:
    def test_patience_in_the_body(self, server, remote) -> None:
        details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}]
        server.next(status(429, {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": details}}))
        with pytest.raises(errors.ProviderBusy) as raised:
            embed(remote, "one")
        assert raised.value.retry_after_ms == 34_500

    @pytest.mark.parametrize("delay", ["", "s", "soon", 34, None, "nans", "infs"])
    def test_patience_that_makes_no_sense(self, delay, server, remote) -> None:
        server.next(status(429, {"error": {"details": [{"retryDelay": delay}]}}))
        with pytest.raises(errors.ProviderBusy) as raised:
            embed(remote, "one")
        assert raised.value.retry_after_ms is None

    @pytest.mark.parametrize("embeddings", [None, {}, [None], [{}], [{"values": 1}], [{"values": []}]], ids=repr)
    def test_what_is_no_embedding_reply(self, embeddings, server, remote) -> None:
        server.next(json_reply({"embeddings": embeddings}))
        with pytest.raises(errors.ReplyRefused):
            embed(remote, "one")

    def test_the_count_is_checked(self, server, remote) -> None:
        server.next(vectors(dropped(0)))
        with pytest.raises(errors.ReplyRefused, match="2 texts were sent and 1 vectors"):
            embed(remote, "one", "two")

    def test_the_numbers_are_checked(self, server, remote) -> None:
        server.next(vectors(with_number(math.nan)))
        with pytest.raises(errors.ReplyNotFinite):
            embed(remote, "one")

    def test_silence(self, server, remote) -> None:
        server.next(hang())
        with pytest.raises(ProviderTimeoutError) as raised:
            embed(remote, "one", deadline_s=0.3)
        assert raised.value.code == PROVIDER_TIMEOUT


@pytest.mark.django_db(transaction=True)
@pytest.mark.both_databases
class TestNoQueue:
    @pytest.fixture
    def site(self, server, tmp_path):
        return make_site(GEMINI, server, tmp_path, embedding_timeout_ms=1_000)

    def test_its_policy_notifies_nobody(self, site) -> None:
        policy = admission.policy_for(site.provider)
        assert (policy.notifies, policy.cap(1)) == (False, None)

    def test_a_timeout_notifies_nobody_and_each_outcome_stands_for_itself(self, site) -> None:
        site.server.when(containing("alpha"), hang())
        first, other = site.repository("a", *texts("alpha", 3)), site.repository("b", *texts("beta", 3))
        run = site.swept(first, other)
        assert all_codes(run, first, other) == [
            ("deferred", codes.PROVIDER_TIMED_OUT, PROVIDER_TIMEOUT),
            ("succeeded", "", ""),
        ]
        assert (run.circuit.state, run.status) == ("closed", "degraded")

    def test_any_number_at_once_whatever_the_row_says(self, site) -> None:
        site.configure(embedding_timeout_ms=60_000)
        gate = Gate()
        site.server.script(lambda call: gated(gate))
        chosen = [site.repository(name, *texts(name, 3)) for name in ("alpha", "beta", "gamma")]
        run = site.start_and_scan(*chosen, concurrency=3)
        with in_threads() as submit:
            for _ in chosen:
                submit(lambda: sweep.drain(site.provider.pk))
            gate.wait_arrived(3)
            gate.release()
        assert (site.carry_out(run).status, site.server.peak_in_flight) == ("completed", 3)
        assert not EmbeddingTask.objects.exclude(slot=None).exists()
        assert sum(map(stored, chosen)) == 9

    def test_the_list_and_the_source_say_so(self, site) -> None:
        said = manage("provider", "list").err
        assert "the guarantee of the queued providers does not hold" in " ".join(said.split())
        (facts,) = manage("provider", "list", "--json").json["providers"]
        assert (facts["admission"], facts["is_queued"]) == ("unqueued", False)
        assert "guarantee" in gemini.__doc__
