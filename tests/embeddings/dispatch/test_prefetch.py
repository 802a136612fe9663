"""A call that is held before the wire: nothing of it leaves before it is released, with every kind of provider."""

import asyncio
import time
from threading import Event

import pytest

from embeddings.dispatch.batches import Batch
from embeddings.dispatch.calls import Prefetched
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


def prefetch(adapter, deadline_s=5.0, held=None):
    """One call of one text, held."""
    held = held or asyncio.Event()
    call = EmbeddingCall(
        texts=("alpha",), model="embed", is_interactive=False, deadline_s=deadline_s, left=Event(), held=held
    )
    return Prefetched(7, Batch(("alpha",), ((1,),)), adapter, call, held, event_loop.submit(adapter.embed(call)))


def release(call):
    event_loop.loop().call_soon_threadsafe(call.held.set)


def is_held(ready):
    """Whether its coroutine has come to the wire and waits there."""
    return eventually(lambda: event_loop.run(_waits(ready.held)), message="the call to wait at the wire")


async def _waits(held):
    return bool(held._waiters)


def test_nothing_leaves_before_the_release(adapter, server):
    ready = prefetch(adapter)
    assert is_held(ready)
    assert server.connections_accepted == 0
    release(ready)
    reply = ready.future.result(5)
    assert ready.call.left.is_set()
    assert adapter.decode(reply, 1, None).shape == (1, 4)
    assert [call.texts for call in server.embedding_calls] == [("alpha",)]


def test_twin_what_nothing_holds_leaves_at_once(adapter, server):
    held = asyncio.Event()
    held.set()
    ready = prefetch(adapter, held=held)
    ready.future.result(5)
    assert len(server.embedding_calls) == 1


def test_what_is_dropped_never_leaves(adapter, server):
    ready = prefetch(adapter)
    assert is_held(ready)
    ready.future.cancel()
    assert ready.future.cancelled()
    release(ready)
    event_loop.run(asyncio.sleep(0))
    assert server.connections_accepted == 0


def test_the_deadline_runs_from_the_release(adapter, server):
    server.when(lambda call: True, hang())
    ready = prefetch(adapter, deadline_s=0.2)
    assert is_held(ready)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        ready.future.result(0.3)
    assert server.connections_accepted == 0
    release(ready)
    with pytest.raises(ProviderTimeoutError):
        ready.future.result(5)
    assert time.monotonic() - began > 0.5
