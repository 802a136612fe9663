"""What clients do with a connection: offers of an upgrade, and connections that are kept."""

import json
import re
import select
import socket
from urllib.parse import urlsplit

import pytest
import uvicorn

from tests.support.processes import CHECKOUT, start_web

# The default of a server that keeps connections for 5 s, and a margin.
IDLE_S = 6.0
PROXIES_KEEP_S = 60


def connected(url):
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def request(body, *, key="none", framing="length", upgrade=True):
    """A chat request as Java's HttpClient and curl --http2 send it: with an offer to go on in HTTP/2."""
    offer = (
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
        if upgrade
        else ""
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n{offer}"
    if framing == "length":
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def answers(connection):
    """The status of every answer on the connection until it has been quiet for a moment, and all of its bytes."""
    received = b""
    while select.select([connection], [], [], 2.0 if received else 20.0)[0] and (piece := connection.recv(65536)):
        received += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)], received


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("is_split", [False, True], ids=["one packet", "several"])
def test_an_upgrade_that_is_not_taken_is_ignored(chat, framing, is_split):
    model = chat.provider.chat_model
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why?"}]}).encode()
    head, rest = request(body, key=chat.key, framing=framing)
    pieces = [head[:40], head[40:], rest[:20], rest[20:]] if is_split else [head + rest]
    with connected(chat.url) as connection:
        for piece in pieces:
            connection.sendall(piece)
        statuses, received = answers(connection)
        assert statuses == [200], received
        assert b"chat.completion" in received
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert answers(connection)[0] == [200]


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_beside_an_upgrade_is_no_request(chat, framing):
    smuggled = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {chat.key}\r\n\r\n".encode()
    with connected(chat.url) as connection:
        connection.sendall(b"".join(request(smuggled, key=chat.key, framing=framing)))
        statuses, received = answers(connection)
    assert statuses == [400], received
    assert b'"object": "list"' not in received


@pytest.mark.parametrize("document", ["Procfile", "README.md"])
def test_each_documented_command_has_these_options(document):
    (words,) = re.findall(r"uvicorn project\.asgi:application(.*)", (CHECKOUT / document).read_text())
    options = uvicorn.main.make_context("uvicorn", ["app", *re.sub(r"\$\{.*?\}", "0", words).split()]).params
    assert options["http"] == "h11"
    assert options["timeout_keep_alive"] > PROXIES_KEEP_S


def test_a_kept_connection_outlives_a_proxys(chat):
    with connected(chat.url) as connection:
        get = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        connection.sendall(get)
        assert answers(connection)[0] == [200]
        assert not select.select([connection], [], [], IDLE_S)[0], "the server closed a kept connection"
        connection.sendall(get)
        assert answers(connection)[0] == [200]


def test_twin_a_server_that_keeps_a_connection_for_a_second_closes_it(chat_stack):
    web, address = start_web("web-short", "--timeout-keep-alive", "1")
    try:
        with connected(address) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert answers(connection)[0] == [200]
            assert select.select([connection], [], [], IDLE_S)[0]
            assert connection.recv(1) == b""
    finally:
        web.end()
