"""Replies that a script composes: refusals, silences, broken bodies, altered vectors, slow and cut connections."""

from collections.abc import Mapping, Sequence
from typing import Any

from .dialects import Embedding, Item, Transform, embedding_body
from .exchange import Exchange, Gate, Outlet, Reply
from .script import Predicate
from .wire import head, response, to_json


def default() -> Reply:
    """What the server answers when no script says otherwise."""
    return Reply("default", lambda exchange: exchange.default.play(exchange))


def hang() -> Reply:
    """Read the request and answer nothing, until the client closes or the server stops."""
    return Reply("hang", lambda exchange: exchange.wait(None))


def hang_after_headers(content_type: str = "application/json") -> Reply:
    """Send the head of a 200 whose body never comes."""

    def play(exchange: Exchange) -> None:
        exchange.send(head(200, {"Content-Type": content_type, "Content-Length": "65536"}))
        exchange.wait(None)

    return Reply("hang_after_headers", play)


def status(
    code: int,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    content_type: str = "application/json",
) -> Reply:
    """A response with `code`. `body` is bytes or text sent as they are, else JSON; None is an OpenAI-shaped error."""
    content = {"error": {"message": f"scripted {code}", "type": "scripted", "code": code}} if body is None else body
    data = _to_bytes(content)
    return Reply(f"status({code})", lambda exchange: exchange.finish(response(code, data, headers, content_type)))


def json_reply(value: Any, headers: Mapping[str, str] | None = None) -> Reply:
    """A 200 with `value` as JSON."""
    return status(200, to_json(value), headers)


def raw(data: bytes) -> Reply:
    """Exactly these bytes, head included, and then a FIN."""

    def play(exchange: Exchange) -> None:
        exchange.keep_alive = False
        exchange.finish(data)

    return Reply("raw", play)


def vectors(transform: Transform | None = None, encoding: str | None = None, dimensions: int | None = None) -> Reply:
    """The default embedding reply, altered as `Embedding` says; without the server's latency."""
    change = Embedding(dimensions, transform, encoding)

    def play(exchange: Exchange) -> None:
        exchange.finish(response(200, embedding_body(exchange.call, exchange.dimensions, change)))

    return Reply("vectors", play)


def wrong_dimensions(n: int) -> Reply:
    """The default embedding reply with vectors of `n` numbers."""
    return vectors(dimensions=n)


def delay(seconds: float, reply: Reply | None = None) -> Reply:
    """`reply` (None: the default) after `seconds` of silence."""

    def play(exchange: Exchange) -> None:
        exchange.wait(seconds)
        (reply or exchange.default).play(exchange)

    return Reply(f"delay({seconds})", play)


def gated(gate: Gate, reply: Reply | None = None) -> Reply:
    """`reply` (None: the default) once `gate` lets the call through."""

    def play(exchange: Exchange) -> None:
        gate.hold(exchange)
        (reply or exchange.default).play(exchange)

    return Reply("gated", play)


def close_without_answer() -> Reply:
    """A FIN instead of an answer."""
    return Reply("close_without_answer", lambda exchange: exchange.close())


def reset() -> Reply:
    """A RST instead of an answer."""
    return Reply("reset", lambda exchange: exchange.reset())


def truncate(reply: Reply, after_bytes: int) -> Reply:
    """`reply` cut by a FIN after so many bytes, its head included."""

    def play(exchange: Exchange) -> None:
        exchange.outlet = _cutting(exchange, after_bytes)
        reply.play(exchange)

    return Reply(f"truncate({reply})", play)


def drip(reply: Reply | bytes, interval: float, at_once: int = 0) -> Reply:
    """`reply` byte by byte with `interval` seconds between; its first `at_once` bytes together."""
    whole = raw(reply) if isinstance(reply, bytes) else reply

    def play(exchange: Exchange) -> None:
        exchange.outlet = _dripping(exchange, interval, at_once)
        whole.play(exchange)

    return Reply(f"drip({whole})", play)


def containing(text: str) -> Predicate:
    """Whether a call carries `text` inside one of its texts."""
    return lambda call: any(text in each for each in call.texts)


def reordered(order: Sequence[int]) -> Transform:
    """The items in this order, each keeping its own index."""
    return lambda items: [items[at] for at in order]


def dropped(at: int) -> Transform:
    """All items but the one at `at`."""
    return lambda items: items[:at] + items[at + 1 :]


def indexed(*indices: Any) -> Transform:
    """The items with these indices instead of theirs: duplicates, out of range, of another type."""
    return lambda items: [{**item, "index": index} for item, index in zip(items, indices, strict=True)]


def without_index(items: list[Item]) -> list[Item]:
    """The items with no index at all."""
    return [{name: value for name, value in item.items() if name != "index"} for item in items]


def with_number(value: Any, at: int = 0, place: int = 0) -> Transform:
    """`value` (NaN, Infinity, None, a string) as number `place` of the vector of item `at`."""

    def transform(items: list[Item]) -> list[Item]:
        items[at]["embedding"][place] = value
        return items

    return transform


def as_strings(items: list[Item]) -> list[Item]:
    """Every number as a string."""
    return [{**item, "embedding": [repr(number) for number in item["embedding"]]} for item in items]


def _to_bytes(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    return content.encode() if isinstance(content, str) else to_json(content)


def _cutting(exchange: Exchange, after_bytes: int) -> Outlet:
    onward, left = exchange.outlet, after_bytes

    def outlet(data: bytes, more: bool = False) -> None:
        nonlocal left
        onward(data[:left])
        left -= len(data)
        if left <= 0:
            exchange.close()

    return outlet


def _dripping(exchange: Exchange, interval: float, at_once: int) -> Outlet:
    onward, together = exchange.outlet, at_once

    def outlet(data: bytes, more: bool = False) -> None:
        nonlocal together
        first, rest = data[:together], data[together:]
        together -= len(first)
        if first:
            onward(first)
        for at in range(len(rest)):
            exchange.wait(interval)
            onward(rest[at : at + 1])

    return outlet
