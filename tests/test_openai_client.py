"""An official OpenAI client, unmodified, against `/v1`: through the web process, the worker, Valkey and back."""

import pytest

from tests.provider_server import status
from tests.provider_server.chat_stream import A, D, F, R, T, U, Z, delta, finish, sse
import openai


def ask(client, **values):
    return client.chat.completions.create(
        **{"model": "scripted", "messages": [{"role": "user", "content": "Why?"}]} | values
    )


def test_a_completion(chat):
    reply = ask(chat.openai())
    assert reply.choices[0].message.content == "The gates hold."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == 12
    assert reply.model == "scripted"


def test_a_stream(chat):
    chunks = list(ask(chat.openai(), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The gates hold."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
