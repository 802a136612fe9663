"""`python -m benchmarks.chat_server --chunks N --interval S`: a model server that uses as little CPU as it can.

It answers every chat completion with N text deltas. Each holds the time at which it was sent, so that a client on the
same machine can measure its delay. Without an interval, deltas are sent as fast as the client reads them, one stream
after another in turn. Prints its address.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"bench"}]}'


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chat_server", description=__doc__)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--interval", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(_serve(options.chunks, options.interval))


async def _serve(chunks: int, interval: float) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(_length(head))
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS))
                else:
                    await _stream(writer, chunks, interval)
        writer.close()

    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    listener = await asyncio.start_server(converse, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
    await ending.wait()


async def _stream(writer: asyncio.StreamWriter, chunks: int, interval: float) -> None:
    writer.write(_HEAD + _event('"delta":{"role":"assistant","content":""},"finish_reason":null'))
    due = time.monotonic()
    for _ in range(chunks):
        due += interval
        await asyncio.sleep(max(0.0, due - time.monotonic()) if interval else 0)
        writer.write(_event(f'"delta":{{"content":"@{time.monotonic_ns()} "}},"finish_reason":null'))
        await writer.drain()
    writer.write(_event('"delta":{},"finish_reason":"stop"') + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


def _event(choice: str) -> bytes:
    head = '"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"bench"'
    return _framed(f'data: {{{head},"choices":[{{"index":0,{choice}}}]}}\n\n'.encode())


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


if __name__ == "__main__":
    main()
