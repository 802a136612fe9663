"""Attempts for tests: one call to a scripted model server, with budgets in tens and hundreds of milliseconds."""

import asyncio
from dataclasses import dataclass, field

from streaming.upstream.budgets import resolve_budgets
from streaming.upstream.pipeline import AttemptResult, ProviderConfig, close_clients, open_attempt
from streaming.upstream.retry import decide_retry
from tests.support.provider_server import Reply, sse
from tests.support.strict_loop import run
from tests.support.waiting import PROMPTLY_S

QUESTION = {"messages": [{"role": "user", "content": "What holds?"}]}


@dataclass
class Played:
    """What an attempt gave: its deltas, and how it ended."""

    deltas: list = field(default_factory=list)
    result: AttemptResult | None = None

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    @property
    def end(self):
        return self.result.end_state, self.result.error_kind

    @property
    def retried(self):
        return decide_retry(
            self.result.classification, delivered=self.result.delivered, transport_retries=0, content_retries=0
        ).retry


def config_of(server, *, base_url=None, lenient=False, api_key=None, **budgets):
    asked = {"stream_idle_timeout_ms": 10_000, "finish_grace_ms": 100} | budgets
    return ProviderConfig(
        "local", base_url or server.openai_url, "m", api_key, resolve_budgets(**asked), lenient=lenient
    )


async def attempt(config, request=None, *, pause=0.0, is_cancelled=lambda: False):
    played = Played()
    async with open_attempt(config, request or QUESTION, is_cancelled=is_cancelled) as running:
        async for found in running:
            played.deltas.append(found)
            if pause:
                await asyncio.sleep(pause)
    played.result = running.result
    return played


async def then_close(work):
    try:
        return await work
    finally:
        await close_clients()


def play(server, *steps, request=None, pause=0.0, **config):
    """One attempt at a stream of these steps, or at one reply."""
    server.next(steps[0] if isinstance(steps[0], Reply) else sse(*steps))
    return run(then_close(attempt(config_of(server, **config), request, pause=pause)))


def ended_by(server):
    return server.wait_until_ended(server.chat_calls[-1].number, timeout=PROMPTLY_S).ended_by


def then_hang(head):
    """These bytes, and then nothing until the client closes."""

    def answer(exchange):
        exchange.send(head)
        exchange.wait(None)

    return Reply("head_then_hang", answer)
