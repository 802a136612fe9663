"""Connections for the HTTP client under a chat stream, at a third of what its own cost for each packet (a chat has
thousands a second): those enter a cancel scope and a time limit, and pause and resume the socket, at every read.

A read costs as much as some packets do. Where hundreds of streams run, what comes for one of them shortly after it was read
is therefore gathered and read at once.

No time limits: the watchdog is the one owner of time (docs/architecture.md, Chat). TCP and TLS only; no Unix sockets.
Errors are httpcore2's own, the system's error as their cause.
"""

from __future__ import annotations

import asyncio
import select
import socket as sockets
import ssl
from collections.abc import Iterable
from typing import Any, cast

import httpcore2
from aiohappyeyeballs import start_connection
from httpcore2 import SOCKET_OPTION

# So much may wait unread before the peer has to.
_UNREAD_BYTES_MAX = 256 * 1024
# So many reads a second are made of all streams together, those that are quiet longer than their share not counted.
READS_PER_S = 2_000
# A share that is shorter saves nothing: fewer packets come within it. A longer one would be seen, and could be taken for
# silence by the shortest of budgets.
GATHER_LEAST_S, GATHER_MOST_S = 0.020, 0.100
# The head of a reply and its first text are not gathered.
FIRST_READS = 4
# Nor is what comes faster than it can be read.
GATHERED_BYTES_MAX = 16 * 1024
# Between two addresses of one name, as RFC 8305 recommends.
_NEXT_ADDRESS_S = 0.25
# asyncio's own limit on a handshake, lifted.
_NEVER_S = 1e6


class Backend(httpcore2.AsyncNetworkBackend):
    """For `httpcore2.AsyncConnectionPool`; each connection belongs to the loop that it was made on."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connects to the first address of the name that answers. Raises httpcore2.ConnectError."""
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
            socket = await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S)
            _, wire = await loop.create_connection(lambda: _Wire(loop), sock=socket)
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        return Connection(wire)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Connection(httpcore2.AsyncNetworkStream):
    """One connection. `get_extra_info("abort")` is the function that ends it at once, for both sides."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """What has come, at most `max_bytes`, or what comes next; nothing once the peer has closed."""
        wire = self._wire
        if not wire.unread and not wire.has_ended:
            await wire.news()
        if wire.unread:
            return wire.take(max_bytes)
        if wire.error is not None:
            raise httpcore2.ReadError(str(wire.error)) from wire.error
        return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Returns once the socket has taken the buffer, but for the little that the loop may hold."""
        if self._wire.error is not None:
            raise httpcore2.WriteError(str(self._wire.error)) from self._wire.error
        if buffer:
            self._wire.reads = 0
            self._wire.transport.write(buffer)
            await self._wire.room()

    async def aclose(self) -> None:
        self._wire.abort()
        # The loop closes the socket in its next round.
        await asyncio.sleep(0)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        """Raises httpcore2.ConnectError. A handshake that is broken off leaves no socket open."""
        wire, loop = self._wire, asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(
                wire.transport, wire, ssl_context, server_hostname=server_hostname, ssl_handshake_timeout=_NEVER_S
            )
        except BaseException as error:
            wire.abort()
            if isinstance(error, OSError):
                raise httpcore2.ConnectError(str(error)) from error
            raise
        assert transport is not None  # noqa: S101 - what the loop promises of transports that are its own
        wire.transport = transport
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "abort":
            return self._wire.abort
        if info == "is_readable":
            # Of a connection that nobody waits for: that it is over, or out of step.
            return self._wire.has_news()
        return self._wire.transport.get_extra_info(_NAMES.get(info, info))


_NAMES = {"client_addr": "sockname", "server_addr": "peername"}


def gather_s(streams: int) -> float:
    """Seconds between two reads of one stream, where so many are waited for."""
    share = streams / READS_PER_S
    return min(share, GATHER_MOST_S) if share > GATHER_LEAST_S else 0.0


class _Wire(asyncio.Protocol):
    """What the loop calls: keeps what came until it is read, and stops the peer when that becomes too much."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.unread = bytearray()
        self.reads = 0
        self.has_ended = False
        self.error: Exception | None = None
        self._loop = loop
        self._is_paused = self._is_lost = False
        self._read_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def abort(self) -> None:
        # A transport that has told of its end no longer has a loop.
        if not self._is_lost:
            self.transport.abort()

    async def news(self) -> None:
        """Until bytes come, or the end."""
        self._reader = self._loop.create_future()
        _waited_for.add(self)
        try:
            await self._reader
        finally:
            _waited_for.discard(self)
            self._reader = None

    async def room(self) -> None:
        """Until more may be written."""
        if self._writer is not None:
            await asyncio.shield(self._writer)

    def take(self, max_bytes: int) -> bytes:
        taken = bytes(self.unread[:max_bytes])
        del self.unread[:max_bytes]
        self.reads += 1
        self._read_at = self._loop.time()
        if self._is_paused and len(self.unread) < _UNREAD_BYTES_MAX:
            self._is_paused = False
            self.transport.resume_reading()
        return taken

    def has_news(self) -> bool:
        if self.unread or self.has_ended or self.transport.is_closing():
            return True
        # What has reached this machine since the loop last looked.
        watch = select.poll()
        watch.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(watch.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.unread += data
        if self._reader is not None:
            self._wake_reader_in_time()
        if len(self.unread) >= _UNREAD_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def eof_received(self) -> None:
        self.has_ended = True
        self._wake_reader()

    def pause_writing(self) -> None:
        self._writer = self._loop.create_future()

    def resume_writing(self) -> None:
        writer, self._writer = self._writer, None
        _wake(writer)

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended = self._is_lost = True
        self.error = error
        self._wake_reader()
        self.resume_writing()

    def _wake_reader_in_time(self) -> None:
        """At once, or when its share of the process's reads has come."""
        due = self._read_at + gather_s(len(_waited_for))
        is_early = self.reads >= FIRST_READS and len(self.unread) < GATHERED_BYTES_MAX and self._loop.time() < due
        if not is_early:
            self._wake_reader()
        elif self._alarm is None:
            self._alarm = self._loop.call_at(due, self._wake_reader)

    def _wake_reader(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        _wake(self._reader)


# On every loop of the process: single operations of a set, which need no lock.
_waited_for: set[_Wire] = set()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
