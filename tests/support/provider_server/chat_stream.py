"""Chat streams, step by step: the vocabulary of event streams as good and bad servers send them.

`R` role-only chunk, `T(x)` text, `Z(x)` reasoning, `A(x)` tool-call arguments, `F` finish, `U` usage, `D` [DONE].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .exchange import Exchange, Gate, Reply
from .wire import LAST_CHUNK, chunk, head, to_json

Step = Callable[[Exchange], None]


@dataclass(frozen=True)
class Packet:
    """Bytes of the stream that travel as one HTTP chunk in one packet."""

    payload: bytes

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(chunk(self.payload))


def sse(
    *steps: Step,
    interval: float = 0.0,
    content_type: str = "text/event-stream; charset=utf-8",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """A chunked event stream: its head at once, then `steps` with `interval` seconds between, then a clean end."""

    def play(exchange: Exchange) -> None:
        exchange.send(head(200, {"Content-Type": content_type, "Transfer-Encoding": "chunked", **(headers or {})}))
        *before, last = steps or (Packet(b""),)
        for step in before:
            step(exchange)
            if interval:
                exchange.wait(interval)
        _play_last(exchange, last)

    return Reply("sse", play)


def data(value: Any) -> Packet:
    """A `data:` event; a string or bytes stand as they are, anything else becomes JSON."""
    content = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else to_json(value)
    return Packet(b"data: " + content + b"\n\n")


def event(name: str, value: Any) -> Packet:
    """A named event."""
    return Packet(b"event: " + name.encode() + b"\n" + data(value).payload)


def block(*lines: str) -> Packet:
    """One event of these lines as they stand: `block("retry: 1000")`, `block("data:")`."""
    return Packet("".join(f"{line}\n" for line in (*lines, "")).encode())


def comment(text: str = "ping") -> Packet:
    """A comment and a blank line, as keep-alives are sent."""
    return block(f": {text}")


def delta(fields: Mapping[str, Any], finish_reason: str | None = None, choice: int = 0) -> Packet:
    """A chat completion chunk with this delta."""
    return _completion([{"index": choice, "delta": dict(fields), "finish_reason": finish_reason}])


def T(text: str, choice: int = 0) -> Packet:
    """Text."""
    return delta({"content": text}, choice=choice)


def Z(text: str) -> Packet:
    """Reasoning, as `reasoning_content`."""
    return delta({"reasoning_content": text})


def A(arguments: str, index: int = 0, **fields: Any) -> Packet:
    """Tool-call arguments; `fields` (id, name) go with the first of them."""
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if "name" in fields:
        call["function"]["name"] = fields["name"]
    if "id" in fields:
        call |= {"id": fields["id"], "type": "function"}
    return delta({"tool_calls": [call]})


def finish(reason: str = "stop", **fields: Any) -> Packet:
    """A finish reason; `fields` stand in the same chunk's delta."""
    return delta(fields, finish_reason=reason)


def usage(prompt: int = 7, completion: int = 5) -> Packet:
    """Usage, with no choices."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return _completion([], usage=counts)


def framed(packet: Packet, newline: str = "\r\n") -> Packet:
    """The event with CRLF or CR line ends."""
    return Packet(packet.payload.replace(b"\n", newline.encode()))


def with_id(identifier: str, packet: Packet) -> Packet:
    """The event with an `id:` line."""
    return Packet(f"id: {identifier}\n".encode() + packet.payload)


def unterminated(packet: Packet) -> Packet:
    """The event without its blank line."""
    return Packet(packet.payload.rstrip(b"\n") + b"\n")


def packets(*payloads: bytes) -> Step:
    """Raw bytes, each in a packet and chunk of its own."""
    return _apart([Packet(payload) for payload in payloads])


def split(packet: Packet, *cuts: int) -> Step:
    """The event cut at these offsets into packets of their own."""
    edges = [0, *cuts, len(packet.payload)]
    return packets(*(packet.payload[start:end] for start, end in pairwise(edges)))


def bytewise(packet: Packet) -> Step:
    """The event with each byte in a packet of its own: every multi-byte character and line end is split."""
    return split(packet, *range(1, len(packet.payload)))


def bom() -> Packet:
    """A byte order mark."""
    return Packet(b"\xef\xbb\xbf")


def silence(seconds: float) -> Step:
    """Send nothing for `seconds`."""
    return lambda exchange: exchange.wait(seconds)


def silence_forever() -> Step:
    """Send nothing until the client closes or the server stops."""
    return lambda exchange: exchange.wait(None)


def at_gate(gate: Gate) -> Step:
    """Send nothing until `gate` lets the stream through."""
    return gate.hold


def repeat(times: int, *steps: Step) -> Step:
    """`steps`, so many times."""

    def play(exchange: Exchange) -> None:
        for _ in range(times):
            for step in steps:
                step(exchange)

    return play


def forever(*steps: Step) -> Step:
    """`steps` until the client closes or the server stops."""

    def play(exchange: Exchange) -> None:
        while True:
            for step in steps:
                step(exchange)

    return play


def endless_line(size: int = 65536) -> Step:
    """One `data:` line that never ends, `size` bytes a packet."""
    start, rest = Packet(b"data: "), forever(Packet(b"x" * size))

    def play(exchange: Exchange) -> None:
        start(exchange)
        rest(exchange)

    return play


def fin() -> Step:
    """A FIN before the terminating chunk."""
    return lambda exchange: exchange.close()


def fin_inside_chunk() -> Step:
    """A FIN inside a chunk that promised more."""

    def play(exchange: Exchange) -> None:
        exchange.send(b'400\r\ndata: {"id"')
        exchange.close()

    return play


def rst() -> Step:
    """A RST."""
    return lambda exchange: exchange.reset()


def _completion(choices: list[dict[str, Any]], **fields: Any) -> Packet:
    chunk_of_chat = {"id": "chatcmpl-scripted", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    return data({**chunk_of_chat, "choices": choices, **fields})


def _play_last(exchange: Exchange, last: Step) -> None:
    """Send the last event together with the terminating chunk: a client that leaves after [DONE] has been answered."""
    if isinstance(last, Packet):
        exchange.finish((chunk(last.payload) if last.payload else b"") + LAST_CHUNK)
        return
    last(exchange)
    exchange.finish(LAST_CHUNK)


def _apart(parts: list[Packet]) -> Step:
    """Parts with a pause between, without which one read of the client would take several."""

    def play(exchange: Exchange) -> None:
        for part in parts:
            part(exchange)
            exchange.wait(0.001)

    return play


R = delta({"role": "assistant", "content": ""})
F = finish()
U = usage()
D = data("[DONE]")
