"""Connections for the HTTP client under a chat stream (docs/decisions/0010-connections-of-our-own-under-a-chat.md).

They cost about half as much processor time a packet as the client's own, which enter a cancel scope and a time limit, and
pause and resume the socket, at every read.

With hundreds of streams in one process, packets that arrive shortly after a stream was read are gathered into one read
(docs/decisions/0011-many-streams-share-the-reads.md).

No time limits: the watchdog alone measures time (docs/architecture.md, Chat). TCP and TLS only, no Unix sockets. Errors are
httpcore2's, with the operating system's error as their cause.
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

# Pause reading above this many buffered bytes.
_UNREAD_BYTES_MAX = 256 * 1024
# How many reads a second all streams of the process share. A stream that is silent for longer than its share costs none.
READS_PER_S = 2_000
# Below the minimum, gathering saves nothing, because few packets arrive that close together. Above the maximum, a person
# would notice the delay, and a very short silence budget could run out.
GATHER_LEAST_S, GATHER_MOST_S = 0.020, 0.100
# The first reads of a reply (its head, its first text) are never delayed.
FIRST_READS = 4
# Above this many buffered bytes, read at once.
GATHERED_BYTES_MAX = 16 * 1024
# The delay before the next address of a name is tried as well, as RFC 8305 recommends.
_NEXT_ADDRESS_S = 0.25
# asyncio insists on a limit for a TLS handshake.
_NO_HANDSHAKE_LIMIT_S = 1e6


class Backend(httpcore2.AsyncNetworkBackend):
    """The network backend of an `httpcore2.AsyncConnectionPool`. A connection belongs to the loop that opened it."""

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
    """One connection. `get_extra_info("abort")` is a function that closes it at once, without waiting for the peer."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """At least one byte and at most `max_bytes`; empty once the peer has closed. Raises httpcore2.ReadError."""
        wire = self._wire
        if not wire.unread and not wire.has_ended:
            await wire.wait_readable()
        if wire.unread:
            return wire.take(max_bytes)
        if wire.error is not None:
            raise httpcore2.ReadError(str(wire.error)) from wire.error
        return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Returns once asyncio's write buffer is below its limit. Raises httpcore2.WriteError."""
        if self._wire.error is not None:
            raise httpcore2.WriteError(str(self._wire.error)) from self._wire.error
        if buffer:
            self._wire.reads = 0
            self._wire.transport.write(buffer)
            await self._wire.wait_writable()

    async def aclose(self) -> None:
        self._wire.abort()
        # The loop closes the socket in its next iteration.
        await asyncio.sleep(0)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        """Raises httpcore2.ConnectError. A handshake that fails or is cancelled leaves no socket open."""
        wire, loop = self._wire, asyncio.get_running_loop()
        has_started = False
        try:
            transport = await loop.start_tls(
                wire.transport,
                wire,
                ssl_context,
                server_hostname=server_hostname,
                ssl_handshake_timeout=_NO_HANDSHAKE_LIMIT_S,
            )
            assert transport is not None  # noqa: S101 - None only for a transport that was already closing
            wire.transport = transport
            has_started = True
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        finally:
            if not has_started:
                wire.abort()
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "abort":
            return self._wire.abort
        if info == "is_readable":
            # The pool asks this of an idle connection: readable means that the peer has closed it or sent stray bytes.
            return self._wire.poll()
        return self._wire.transport.get_extra_info(_NAMES.get(info, info))


_NAMES = {"client_addr": "sockname", "server_addr": "peername"}


def gather_s(streams: int) -> float:
    """The least number of seconds between two reads of one stream while `streams` are waiting for data."""
    share = streams / READS_PER_S
    return min(share, GATHER_MOST_S) if share > GATHER_LEAST_S else 0.0


class _Wire(asyncio.Protocol):
    """The asyncio protocol: buffers received bytes until they are read, and pauses reading when there are too many."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.unread = bytearray()
        self.reads = 0
        self.has_ended = False
        self.error: Exception | None = None
        self._loop = loop
        self._is_paused = self._is_lost = False
        self._read_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    def abort(self) -> None:
        # A transport that has called `connection_lost` has given up its loop: a second abort would raise.
        if not self._is_lost:
            self.transport.abort()

    async def wait_readable(self) -> None:
        """Returns when bytes arrive (perhaps gathered) or the connection ends."""
        self._readable = self._loop.create_future()
        _waiting.add(self)
        try:
            await self._readable
        finally:
            _waiting.discard(self)
            self._readable = None

    async def wait_writable(self) -> None:
        """Returns when asyncio's write buffer is below its limit, or the connection ends."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def take(self, max_bytes: int) -> bytes:
        taken = bytes(self.unread[:max_bytes])
        del self.unread[:max_bytes]
        self.reads += 1
        self._read_at = self._loop.time()
        if self._is_paused and len(self.unread) < _UNREAD_BYTES_MAX:
            self._is_paused = False
            self.transport.resume_reading()
        return taken

    def poll(self) -> bool:
        """Whether there is anything to read now, the end of the connection included."""
        if self.unread or self.has_ended or self.transport.is_closing():
            return True
        # Bytes, or an end, may have reached the socket since the loop last polled it.
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.unread += data
        if self._readable is not None:
            due = self._read_at + gather_s(len(_waiting))
            is_early = self.reads >= FIRST_READS and len(self.unread) < GATHERED_BYTES_MAX and self._loop.time() < due
            if not is_early:
                self._wake_reader()
            elif self._timer is None:
                self._timer = self._loop.call_at(due, self._wake_reader)
        if len(self.unread) >= _UNREAD_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def eof_received(self) -> None:
        self.has_ended = True
        self._wake_reader()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        _wake(writable)

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended = self._is_lost = True
        self.error = error
        self._wake_reader()
        self.resume_writing()

    def _wake_reader(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _wake(self._readable)


# The connections of every loop of the process that wait for data. Single operations of a set need no lock.
_waiting: set[_Wire] = set()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
