"""The whole chat path for tests: a web process and a worker process of this checkout, shared by the session.

Each test has a scripted model server, a tenant and a key of its own; the processes only ever see rows and requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from django.conf import settings
from django.db import connection

from embeddings.models import Provider, Tenant
from embeddings.registry import issue_key
from project.runtime.embedded import hold_valkey
from streaming.models import ChatTurn
from streaming.states import TURN_UNFINISHED
from tests.support.factories import make_provider, make_tenant
from tests.support.provider_server import ProviderServer, unused_port
from tests.support.waiting import eventually

CHECKOUT = Path(__file__).resolve().parents[2]

# Tens and hundreds of milliseconds where production has seconds.
LIMITS = {
    "LEASE_MS": "1500",
    "LEASE_RENEW_MS": "300",
    "CHAT_CLAIM_WAIT_MS": "1000",
    "CHAT_STATUS_WAIT_MS": "600",
    "CHAT_HEARTBEAT_MS": "300",
    "CHAT_RETRY_BASE_MS": "10",
    "CHAT_TURNS_PER_TENANT": "6",
    "CHAT_REQUEST_BYTES_MAX": "100000",
    "CHAT_ANSWER_CHARACTERS_MAX": "20000",
    "LOG_LEVEL": "INFO",
}


def process_environ() -> dict[str, str]:
    """The environment of a process that shares this session's database and Valkey."""
    name = connection.settings_dict["NAME"]
    if connection.vendor == "sqlite":
        url = f"sqlite://{name}"
    else:
        url = os.environ["DATABASE_URL"].replace("/postgres?", f"/{name}?", 1)
    return os.environ | LIMITS | {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "project.settings"}


class Process:
    """A child process with its output in a file."""

    def __init__(self, name: str, *arguments: str, **environ: str) -> None:
        self.log = Path(settings.VAR_DIR) / f"{name}.log"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=CHECKOUT,
                env=process_environ() | environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def terminate(self, timeout: float = 10.0) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


def start_worker(name: str = "worker", **environ: str) -> Process:
    """A chat worker, up to the moment that it takes messages."""
    words = ("celery", "--app", "project", "worker", "--pool", "threads", "--concurrency", "16", "--queues", "chat")
    flags = ("--loglevel", "INFO", "--hostname", f"{name}@test", "--without-gossip", "--without-mingle")
    process = Process(name, *words, *flags, **environ)
    eventually(lambda: " ready." in process.output, timeout=60, message=f"{name} is ready")
    return process


def start_web(name: str = "web", **environ: str) -> tuple[Process, str]:
    """A web process, and its address."""
    port = unused_port()
    process = Process(
        name,
        "uvicorn",
        "project.asgi:application",
        "--port",
        str(port),
        "--lifespan",
        "off",
        "--no-access-log",
        **environ,
    )
    address = f"http://127.0.0.1:{port}"
    eventually(lambda: _answers(f"{address}/healthz"), timeout=60, message=f"{name} answers")
    return process, address


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


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
