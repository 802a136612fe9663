"""A proxy with one address for two model servers: it forwards each request by its path, byte for byte.

llama.cpp serves one model per server, and a provider has one base URL. Every request gets a connection of its own to
the server behind (`Connection: close`), because a persistent connection may carry requests for either.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

_HEAD_BYTES_MAX = 64 * 1024
_PIECE_BYTES = 64 * 1024
_CONNECTION_HEADER = re.compile(
    rb"^(?:connection|keep-alive|proxy-connection)[ \t]*:.*\r\n", re.IGNORECASE | re.MULTILINE
)


@dataclass
class ModelFront:
    """`ports` maps a path's end (`/embeddings`) to a server on 127.0.0.1; every other path goes to `default_port`."""

    models: tuple[str, ...]
    ports: Mapping[str, int]
    default_port: int
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, port: int) -> asyncio.Server:
        """Listen on 127.0.0.1 alone; 0 takes a free port. Raises OSError when the port is taken."""
        return await asyncio.start_server(self._serve, "127.0.0.1", port, limit=_HEAD_BYTES_MAX)

    async def stop(self) -> None:
        """Close the remaining connections."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine always runs in a task
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has disconnected
        except asyncio.CancelledError:
            pass  # the front stops
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        words = first.split(b" ")
        path = words[1].split(b"?", 1)[0].decode("latin-1") if len(words) == 3 else ""
        if path == "/v1/models":
            rows = [{"id": name, "object": "model", "created": 0, "owned_by": "local"} for name in self.models]
            body = json.dumps({"object": "list", "data": rows}).encode()
            fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
            writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + body)
            await writer.drain()
            return
        port = next((port for end, port in self.ports.items() if path.endswith(end)), self.default_port)
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            behind_writer.write(first + b"\r\nConnection: close\r\n" + _CONNECTION_HEADER.sub(b"", rest))
            await _either(_pump(reader, behind_writer), _pump(behind_reader, writer))
        finally:
            behind_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


async def _either(upstream: Coroutine[Any, Any, None], downstream: Coroutine[Any, Any, None]) -> None:
    """Run both until one ends: the answer is complete, or the client has disconnected, which frees the server."""
    tasks = {asyncio.create_task(upstream), asyncio.create_task(downstream)}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
