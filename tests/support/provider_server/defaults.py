"""What unscripted calls get."""

from dataclasses import dataclass
from typing import Any

from .chat_stream import D, F, R, Step, T, repeat, silence, sse, usage
from .dialects import Embedding, catalogue, embedding_body
from .exchange import Exchange
from .wire import response, to_json

DEFAULT_ANSWER = "The gates hold."


@dataclass(frozen=True)
class Defaults:
    """Unscripted answers: `latency` is seconds from an embedding call to its reply; `chat_chunks` text deltas, each
    `chat_interval` seconds after the one before, replace the short answer."""

    dimensions: int = 384
    latency: float = 0.0
    models: tuple[str, ...] = ("scripted-embedding", "scripted-chat")
    answer: str = DEFAULT_ANSWER
    chat_chunks: int = 0
    chat_interval: float = 0.0

    def play(self, exchange: Exchange) -> None:
        call = exchange.call
        if call.kind == "embedding":
            answer = response(200, embedding_body(call, self.dimensions, Embedding()))
            exchange.wait_since_arrival(self.latency)
            exchange.finish(answer)
        elif call.kind == "chat":
            self._play_chat(exchange)
        else:
            found = catalogue(call.path, self.models) if call.method == "GET" else None
            missing = {"error": {"message": f"no such path: {call.path}", "type": "not_found"}}
            exchange.finish(response(200 if found else 404, to_json(found or missing)))

    def _play_chat(self, exchange: Exchange) -> None:
        if not exchange.call.body.get("stream"):
            exchange.finish(response(200, to_json(_completion(self.answer))))
            return
        options = exchange.call.body.get("stream_options") or {}
        ending = [F, usage(), D] if options.get("include_usage") else [F, D]
        sse(R, *self._text_steps(), *ending).play(exchange)

    def _text_steps(self) -> list[Step]:
        if self.chat_chunks:
            pause = [silence(self.chat_interval)] if self.chat_interval else []
            return [repeat(self.chat_chunks, *pause, T("word "))]
        first, *others = self.answer.split(" ")
        return [T(first), *(T(f" {word}") for word in others)]


def _completion(text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
    }
