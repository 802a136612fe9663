"""A minimal Valkey client: PING, CLIENT LIST, SHUTDOWN over a unix socket (leaf, blocking)."""

from __future__ import annotations

import socket
from pathlib import Path

_REPLY_TIMEOUT_S = 5.0


class Connection:
    """A blocking connection. Reads simple strings, errors and bulk strings."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_REPLY_TIMEOUT_S)
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._replies = self._socket.makefile("rb")

    def command(self, *words: str) -> bytes:
        """The reply's text; an error reply is returned with its leading `-`. Raises OSError when the server is gone."""
        encoded = [word.encode() for word in words]
        parts = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)]
        self._socket.sendall(b"".join(parts))
        first = self._replies.readline()
        if not first:
            raise ConnectionResetError("the server closed the connection")
        if first.startswith(b"$"):
            return self._replies.read(int(first[1:]) + 2)[:-2]
        return first.strip()

    def is_alive(self) -> bool:
        try:
            return self.command("PING") == b"+PONG"
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._replies.close()
        self._socket.close()
