"""A call that was prepared ahead: nothing of it is on the wire before it is released, whatever the kind of provider."""

import asyncio
import time
from threading import Event

import pytest

from embeddings.dispatch import prefetch
from embeddings.dispatch.batches import Batch
from embeddings.models import Provider
from embeddings.providers import adapter_for
from embeddings.providers.base import EmbeddingCall
from embeddings.states import ProviderKind
from embeddings.timeouts import ProviderTimeoutError
from project.runtime import event_loop
from tests.support.provider_server import ProviderServer, hang
from tests.support.waiting import eventually

KINDS = [ProviderKind.OPENAI_COMPATIBLE, ProviderKind.OLLAMA, ProviderKind.GEMINI]


@pytest.fixture
def server():
    with ProviderServer(dimensions=4) as running:
        yield running


@pytest.fixture(params=KINDS)
def adapter(request, server, monkeypatch):
    monkeypatch.setenv("SLUICEGATE_KEY_GEMINI", "key")
    urls = {
        ProviderKind.OPENAI_COMPATIBLE: server.openai_url,
        ProviderKind.OLLAMA: server.address,
        ProviderKind.GEMINI: server.gemini_url,
    }
    key = "SLUICEGATE_KEY_GEMINI" if request.param == ProviderKind.GEMINI else ""
    provider = Provider(pk=1, name="p", kind=request.param, base_url=urls[request.param], api_key_env=key)
    return adapter_for(provider)


def prepare(adapter, deadline_s=5.0, held=None):
    """One call of one text, held; and the moment from which its coroutine waits."""
    call = EmbeddingCall(
        texts=("alpha",),
        model="embed",
        is_interactive=False,
        deadline_s=deadline_s,
        left=Event(),
        held=held or asyncio.Event(),
    )
    return prefetch.prepare(7, Batch(("alpha",), ((1,),)), adapter, call)


def is_held(found):
    """Whether its coroutine has come to the wire and waits there."""
    return eventually(lambda: event_loop.run(_waits(found.call.held)), message="the call to wait at the wire")


async def _waits(held):
    return bool(held._waiters)


def test_nothing_leaves_before_the_release(adapter, server):
    found = prepare(adapter)
    assert is_held(found)
    assert server.connections_accepted == 0
    found.release()
    reply = found.future.result(5)
    assert found.call.left.is_set()
    assert adapter.decode(reply, 1, None).shape == (1, 4)
    assert [call.texts for call in server.embedding_calls] == [("alpha",)]


def test_twin_what_nothing_holds_leaves_at_once(adapter, server):
    held = asyncio.Event()
    held.set()
    found = prepare(adapter, held=held)
    found.future.result(5)
    assert len(server.embedding_calls) == 1


def test_what_is_dropped_never_leaves(adapter, server):
    found = prepare(adapter)
    assert is_held(found)
    found.drop()
    assert found.future.cancelled()
    found.release()
    event_loop.run(asyncio.sleep(0))
    assert server.connections_accepted == 0


def test_the_deadline_runs_from_the_release(adapter, server):
    server.when(lambda call: True, hang())
    found = prepare(adapter, deadline_s=0.2)
    assert is_held(found)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        found.future.result(0.3)
    assert server.connections_accepted == 0
    found.release()
    with pytest.raises(ProviderTimeoutError):
        found.future.result(5)
    assert time.monotonic() - began > 0.5


def test_a_call_that_nothing_would_hold_is_refused(adapter):
    call = EmbeddingCall(texts=("a",), model="m", is_interactive=False, deadline_s=1.0, left=Event())
    with pytest.raises(ValueError, match="would leave"):
        prefetch.prepare(7, Batch(("a",), ((1,),)), adapter, call)
