"""The whole chat path for tests: a web process and a worker process of this checkout, shared by the session.

Each test has a scripted model server, a tenant and a key of its own; the processes only ever see rows and requests.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from django.conf import settings

from embeddings.models import Provider, Tenant
from embeddings.registry import issue_key
from project.runtime.embedded import hold_valkey
from streaming.models import ChatTurn
from streaming.states import TURN_UNFINISHED
from tests.support.factories import make_provider, make_tenant
from tests.support.processes import Process, start_web, start_worker
from tests.support.provider_server import ProviderServer
from tests.support.waiting import eventually


@dataclass
class ChatStack:
    """The session's processes. A test that ends the worker calls `restore`."""

    address: str
    web: Process
    worker: Process
    _names: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def restore(self) -> None:
        if self.worker.returncode is not None:
            self.worker = start_worker(f"worker-{next(self._names)}")

    @property
    def logs(self) -> str:
        return "".join(path.read_text() for path in Path(settings.VAR_DIR).glob("w*.log"))


@pytest.fixture(scope="session")
def chat_stack(django_db_setup: None) -> Iterator[ChatStack]:
    hold_valkey(settings.VAR_DIR)
    with contextlib.ExitStack() as ending:
        worker = start_worker()
        ending.callback(lambda: stack.worker.end())
        web, address = start_web()
        ending.callback(web.end)
        stack = ChatStack(address, web, worker)
        yield stack


@dataclass
class Chat:
    """One test's part of the stack: its scripted model server (None where a real one answers), provider, tenant, key."""

    stack: ChatStack
    server: ProviderServer | None
    provider: Provider
    tenant: Tenant
    key: str
    ending: contextlib.ExitStack

    @property
    def url(self) -> str:
        return self.stack.address

    def openai(self, **values: Any) -> openai.OpenAI:
        """An official client with this tenant's key. It does not try again: each call is one request."""
        options = {"api_key": self.key, "base_url": f"{self.url}/v1", "max_retries": 0, "timeout": 20.0} | values
        client = openai.OpenAI(http_client=httpx2.Client(trust_env=False, timeout=20.0), **options)
        self.ending.callback(client.close)
        return client

    def http(self, key: str | None = None) -> httpx2.Client:
        """A plain client with this tenant's key, or another."""
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx2.Client(base_url=self.url, headers=headers, trust_env=False, timeout=20.0)

    def take(self, question: str = "Why?", **fields: Any) -> dict[str, Any]:
        """A native turn, without knowledge unless asked for."""
        body = {"messages": [{"role": "user", "content": question}], "knowledge": False} | fields
        with self.http() as client:
            reply = client.post("/api/chat/turns", json=body)
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def turn(self, identifier: str) -> ChatTurn:
        return ChatTurn.objects.get(public_id=identifier)

    def wait_ended(self, identifier: str, timeout: float = 30.0) -> ChatTurn:
        eventually(lambda: self.turn(identifier).has_ended, timeout=timeout, message="the turn ends")
        return self.turn(identifier)

    def events(self, identifier: str, after: int | None = None, **params: Any) -> list[dict[str, Any]]:
        """Every native event of the turn, to its end."""
        with self.reading(identifier, after, **params) as reader:
            return list(reader)

    @contextlib.contextmanager
    def reading(self, identifier: str, after: int | None = None, **params: Any) -> Iterator[Iterator[dict[str, Any]]]:
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        path = f"/api/chat/turns/{identifier}/events"
        with self.http() as client, client.stream("GET", path, headers=headers, params=params) as reply:
            assert reply.status_code == 200, reply.read()
            yield parsed(reply.iter_lines())


def parsed(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Server-sent events as dicts: `id` (0 without one), `event`, and the data's fields; comments as `comment`."""
    event: dict[str, Any] = {"id": 0}
    for line in lines:
        if line.startswith(":"):
            yield {"id": 0, "event": "comment", "text": line[1:].strip()}
        elif not line:
            if "event" in event:
                yield event
            event = {"id": 0}
        else:
            name, _, value = line.partition(": ")
            event |= json.loads(value) if name == "data" else {name: int(value) if name == "id" else value}


def text_of(events: list[dict[str, Any]], choice: int = 0) -> str:
    """The text that the delta events say."""
    return "".join(
        event["delta"].get("content", "") for event in events if event["event"] == "delta" and event["choice"] == choice
    )


@pytest.fixture
def chat(transactional_db: None, chat_stack: ChatStack) -> Iterator[Chat]:
    """A tenant whose chat and embedding provider is a scripted server, with budgets in hundreds of milliseconds."""
    with ProviderServer() as server:
        provider = make_provider(
            base_url=server.openai_url,
            chat_model="scripted",
            request_timeout_ms=600,
            stream_idle_timeout_ms=600,
            query_timeout_ms=5_000,
        )
        with chat_at(chat_stack, provider, server) as chat:
            yield chat


@contextlib.contextmanager
def chat_at(stack: ChatStack, provider: Provider, server: ProviderServer | None = None) -> Iterator[Chat]:
    """A tenant of the provider with a key. Leaves no turn unfinished, and no process ended."""
    tenant = make_tenant(embedding_provider=provider, chat_provider=provider)
    _, key = issue_key(tenant)
    with contextlib.ExitStack() as ending:
        yield Chat(stack, server, provider, tenant, key, ending)
        if server is not None:
            server.stop()
        stack.restore()
        eventually(
            lambda: not ChatTurn.objects.filter(state__in=TURN_UNFINISHED).exists(),
            message="no turn is left unfinished",
        )
