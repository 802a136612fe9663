"""The wire: one accepted socket, read as HTTP/1.1 and watched for the close of its client."""

import contextlib
import json
import select
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

# Set by the kernel as soon as the peer's FIN arrives, also when unread bytes are still buffered.
_PEER_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)
_MORE = getattr(socket, "MSG_MORE", 0)
_RECEIVE = 1 << 18

LAST_CHUNK = b"0\r\n\r\n"


class ClientClosed(Exception):
    """The client closed or reset its connection."""


class ServerCloses(Exception):
    """The script, or the stopping server, ends the connection."""


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


class StopSignal:
    """A flag that is also a readable file descriptor, so that a poll wakes the moment it is set."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        self._writer.send(b"x")

    def fileno(self) -> int:
        return self._reader.fileno()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Connection:
    """One client's connection. Every wait notices the client's close and the server's stop at once."""

    def __init__(self, sock: socket.socket, stop: StopSignal) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._stop = stop
        self._buffer = bytearray()
        self._close_lock = threading.Lock()

    def read_request(self) -> Request | None:
        """The next request, or None when the connection ends before one is complete."""
        try:
            head = self._read_until(b"\r\n\r\n").decode("latin-1")
            request_line, *lines = head.split("\r\n")
            method, target, _ = request_line.split(" ", 2)
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            return Request(method, target, headers, self._read_body(headers))
        except ClientClosed:
            return None

    def send(self, data: bytes, more: bool = False) -> None:
        """Send all of `data`; `more` lets the kernel hold a partial packet back for the next send."""
        try:
            self._socket.sendall(data, _MORE if more else 0)
        except OSError as error:
            raise (ServerCloses() if self._stop.is_set else ClientClosed()) from error

    def wait(self, seconds: float | None) -> None:
        """Return after `seconds` (None: never); raise ClientClosed or ServerCloses when that comes first."""
        watch = select.poll()
        watch.register(self._socket, _PEER_CLOSED)
        watch.register(self._stop, select.POLLIN)
        events = watch.poll(None if seconds is None else max(0.0, seconds) * 1000)
        if self._stop.is_set:
            raise ServerCloses
        if events:
            raise ClientClosed

    def client_has_closed(self) -> bool:
        """Whether the client's close has reached this machine; callable from any thread."""
        with self._close_lock:
            if self._socket.fileno() < 0:
                return True
            watch = select.poll()
            watch.register(self._socket, _PEER_CLOSED)
            return bool(watch.poll(0))

    def close(self) -> None:
        with self._close_lock:
            self._socket.close()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        with self._close_lock:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.close()

    def abort(self) -> None:
        """Wake whatever thread is blocked on this socket; callable from any thread."""
        with self._close_lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read_body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" not in headers.get("transfer-encoding", ""):
            return self._read_exactly(int(headers.get("content-length", 0)))
        body = bytearray()
        while size := int(self._read_until(b"\r\n").partition(b";")[0], 16):
            body += self._read_exactly(size)
            self._read_until(b"\r\n")
        self._read_until(b"\r\n")
        return bytes(body)

    def _read_until(self, mark: bytes) -> bytes:
        while (at := self._buffer.find(mark)) < 0:
            self._receive()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        return found

    def _read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._receive()
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE)
        except OSError as error:
            raise ClientClosed from error
        if not data:
            raise ClientClosed
        self._buffer += data


def response(
    status: int, body: bytes, headers: Mapping[str, str] | None = None, content_type: str = "application/json"
) -> bytes:
    """A whole HTTP response with a Content-Length."""
    return head(status, {"Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}) + body


def head(status: int, headers: Mapping[str, str]) -> bytes:
    """A status line and headers, blank line included."""
    lines = [f"HTTP/1.1 {status} {_phrase(status)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def to_json(value: Any) -> bytes:
    """Compact JSON; NaN and Infinity are written as such, as sloppy servers do."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
