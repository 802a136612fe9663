"""Ends the embedded Valkey when its users are gone, even if all were killed (docs/architecture.md, Shape).

A script of its own that imports the standard library alone: it runs as long as the server and must stay small. Its standard
input is a connection to the server; its arguments are the start lock's path, the socket's directory and the seconds between
two checks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import sys
from typing import BinaryIO

# Users look for this name in CLIENT LIST to see whether the server has a guard.
CONNECTION_NAME = "sluicegate-guard"


def guard(server: socket.socket, start_lock: str, socket_directory: str, interval_s: float) -> None:
    """Returns when the server has ended, either by itself or because it had no users.

    Raises OSError or ValueError when the connection breaks in the middle of a reply.
    """
    # Without a timeout: while the server is frozen, wait.
    server.settimeout(None)
    replies = server.makefile("rb")
    while not select.select([server], [], [], interval_s)[0]:
        if _has_users(server, replies):
            continue
        with contextlib.ExitStack() as locks:
            # If the data directory was removed, no user can find this server any more, and there is no lock to take.
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(start_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                locks.callback(os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
            # Users connect under the lock: none can come between this second check and the end.
            if _has_users(server, replies):
                continue
            server.sendall(b"SHUTDOWN\r\n")
            # An error reply (the append-only file could not be written) leaves the server running: try again.
            if not replies.readline():
                with contextlib.suppress(OSError):
                    os.rmdir(socket_directory)
                return


def _has_users(server: socket.socket, replies: BinaryIO) -> bool:
    """Whether any connection but a guard's is open. One that has no name counts as a user's."""
    server.sendall(b"CLIENT LIST\r\n")
    length = int(replies.readline()[1:])
    clients = replies.read(length + 2).splitlines()
    return any(client and f" name={CONNECTION_NAME} ".encode() not in client for client in clients)


if __name__ == "__main__":
    # An error here means that the server has ended while it was asked.
    with contextlib.suppress(OSError, ValueError), socket.socket(fileno=0) as connection:
        guard(connection, sys.argv[1], sys.argv[2], float(sys.argv[3]))
