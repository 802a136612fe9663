"""The connections under a chat stream, on real sockets: resets, back-pressure, aborts, TLS and gathered reads."""

import asyncio
import socket
import ssl
import threading
from functools import partial
from pathlib import Path

import httpcore2
import pytest

from streaming.upstream import connections
from streaming.upstream.connections import FIRST_READS, Backend, gather_s
from tests.support.bare_server import bare_server
from tests.support.strict_loop import run
from tests.support.waiting import eventually


def connected(answer, talk):
    """What `talk` gives of a connection to a server that treats its own with `answer`."""

    async def main(port):
        connection = await Backend().connect_tcp("127.0.0.1", port)
        try:
            return await talk(connection)
        finally:
            await connection.aclose()

    with bare_server(answer) as address:
        return run(main(int(address.rpartition(":")[2])))


async def read_all(connection, at_most=65_536):
    parts = []
    while part := await connection.read(at_most):
        parts.append(part)
    return parts


def test_what_came_is_read_in_order_and_in_parts_of_a_bounded_size():
    sent = bytes(range(256)) * 1_000
    parts = connected(lambda peer: peer.sendall(sent), lambda connection: read_all(connection, 1_000))
    assert b"".join(parts) == sent
    assert max(map(len, parts)) <= 1_000


def test_what_came_before_a_reset_is_read_and_then_the_reset_is_told():
    seen = threading.Event()

    def answer(peer):
        peer.sendall(b"so far")
        assert seen.wait(5)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def talk(connection):
        assert await connection.read(100) == b"so far"
        seen.set()
        with pytest.raises(httpcore2.ReadError) as raised:
            await connection.read(100)
        return raised.value.__cause__

    assert isinstance(connected(answer, talk), ConnectionResetError)


def test_what_came_while_the_reader_was_busy_survives_a_reset():
    received = threading.Event()

    def answer(peer):
        peer.sendall(b"so far")
        assert received.wait(5)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def talk(connection):
        wire = connection._wire
        await asyncio.to_thread(eventually, lambda: wire.unread == b"so far", timeout=5)
        received.set()
        await asyncio.to_thread(eventually, lambda: wire.has_ended, timeout=5)
        assert await connection.read(100) == b"so far"
        with pytest.raises(httpcore2.ReadError):
            await connection.read(100)

    connected(answer, talk)


def test_a_peer_that_sends_more_than_is_read_has_to_wait():
    """Twin: once it is read, the peer goes on to its end."""
    sent = []

    def answer(peer):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        peer.settimeout(0.3)
        try:
            while len(sent) < 4_096:
                peer.sendall(b"x" * 65_536)
                sent.append(65_536)
        except TimeoutError:
            stuck.set()
        peer.settimeout(5)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)

    stuck = threading.Event()

    async def talk(connection):
        assert await asyncio.to_thread(stuck.wait, 10)
        return sum(map(len, await read_all(connection)))

    assert connected(answer, talk) >= sum(sent)
    assert sum(sent) < 16_000_000


def test_a_writer_waits_for_a_peer_that_does_not_read_and_an_abort_ends_its_wait():
    over = threading.Event()

    async def talk(connection):
        writing = asyncio.create_task(connection.write(b"x" * 50_000_000))
        assert not (await asyncio.wait({writing}, timeout=0.2))[0]
        connection.get_extra_info("abort")()
        await asyncio.wait_for(writing, 1)
        assert await connection.read(10) == b""
        over.set()

    connected(lambda peer: over.wait(5), talk)


def test_an_idle_connection_that_its_peer_has_closed_is_known_before_the_loop_has_looked():
    closed = threading.Event()
    told = threading.Event()

    def answer(peer):
        assert told.wait(5)
        peer.close()
        closed.set()

    async def talk(connection):
        before = connection.get_extra_info("is_readable")
        told.set()
        closed.wait(5)  # The loop stands still meanwhile.
        eventually(lambda: connection.get_extra_info("is_readable"), timeout=2)
        return before

    assert connected(answer, talk) is False


def test_a_refused_connection_says_so_whatever_the_name_has_for_addresses(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in (1, 2)]

    async def main():
        async def getaddrinfo(*_, **__):
            return addresses

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        with pytest.raises(httpcore2.ConnectError) as raised:
            await Backend().connect_tcp("two.example", port)
        return raised.value.__cause__

    assert run(main()).errno == 111


def test_a_handshake_that_is_cancelled_leaves_no_socket_open():
    ended = threading.Event()

    def answer(peer):
        while peer.recv(65_536):
            pass
        ended.set()

    async def talk(connection):
        handshake = asyncio.create_task(connection.start_tls(ssl.create_default_context(), "localhost"))
        await asyncio.wait({handshake}, timeout=0.1)
        handshake.cancel()
        await asyncio.wait({handshake})
        assert handshake.cancelled()
        assert await asyncio.to_thread(ended.wait, 2)

    connected(answer, talk)


def test_tls_is_spoken_and_a_certificate_of_an_unknown_authority_is_refused():
    certificate = Path(__file__).with_name("localhost.pem")
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate)
    trusting, doubting = ssl.create_default_context(cafile=certificate), ssl.create_default_context()

    def answer(peer):
        with theirs.wrap_socket(peer, server_side=True) as secure:
            secure.sendall(secure.recv(100).upper() * 100_000)

    async def talk(connection):
        secure = await connection.start_tls(trusting, "localhost")
        assert secure.get_extra_info("ssl_object").version()
        await secure.write(b"words")
        return b"".join(await read_all(secure))

    async def talk_to_a_stranger(connection):
        with pytest.raises(httpcore2.ConnectError) as raised:
            await connection.start_tls(doubting, "localhost")
        return raised.value.__cause__

    assert connected(answer, talk) == b"WORDS" * 100_000
    assert isinstance(connected(answer, talk_to_a_stranger), ssl.SSLCertVerificationError)


def test_two_aborts_are_one():
    async def talk(connection):
        abort = connection.get_extra_info("abort")
        abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        abort()
        return await connection.read(10)

    assert connected(lambda peer: peer.recv(1), talk) == b""


class TestGathering:
    """What comes for one stream shortly after it was read, where many are waited for."""

    @pytest.fixture
    def few_reads(self, monkeypatch):
        """A stream may be read every ten seconds: later than any of these tests waits."""
        monkeypatch.setattr(connections, "READS_PER_S", 0.1)
        monkeypatch.setattr(connections, "GATHER_MOST_S", 10.0)

    @staticmethod
    def reads_of(parts, *, first=FIRST_READS, one_by_one=False):
        """The reads that `parts` take after the first reads of a reply. Each part is sent once the one before it has
        arrived; `one_by_one`, once it has been read."""
        reads, wires = [], []

        def awaits_more(sent, is_read):
            if not wires or wires[0] not in connections._waiting:
                return False
            return b"".join(reads) + (b"" if is_read else bytes(wires[0].unread)) == sent

        def answer(peer):
            sent = b""
            for number, part in enumerate([b"-"] * first + parts):
                eventually(partial(awaits_more, sent, one_by_one or number <= first), timeout=5)
                peer.sendall(part)
                sent += part
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)

        async def talk(connection):
            wires.append(connection._wire)
            while part := await connection.read(65_536):
                reads.append(part)
            return reads[first:]

        return connected(answer, talk)

    def test_it_is_read_in_one(self, few_reads):
        assert self.reads_of([b"a", b"b", b"c"]) == [b"abc"]

    def test_twin_with_reads_to_spare_each_part_is_read_as_it_comes(self):
        assert self.reads_of([b"a", b"b", b"c"], one_by_one=True) == [b"a", b"b", b"c"]

    def test_the_first_reads_of_a_reply_wait_for_nothing(self, few_reads):
        assert self.reads_of([b"a", b"b", b"c"], first=0, one_by_one=True) == [b"a", b"b", b"c"]

    def test_nor_does_a_flood(self, few_reads, monkeypatch):
        monkeypatch.setattr(connections, "GATHERED_BYTES_MAX", 3)
        assert self.reads_of([b"a", b"bc", b"d"]) == [b"abc", b"d"]

    def test_what_nothing_follows_is_read_when_its_time_has_come(self, few_reads, monkeypatch):
        monkeypatch.setattr(connections, "GATHER_MOST_S", 0.05)
        assert self.reads_of([b"a", b"b"], one_by_one=True) == [b"a", b"b"]

    @pytest.mark.parametrize(
        ("streams", "seconds"), [(0, 0), (1, 0), (40, 0), (41, 0.0205), (100, 0.05), (200, 0.1), (5_000, 0.1)]
    )
    def test_a_streams_share_of_the_reads(self, streams, seconds):
        assert gather_s(streams) == pytest.approx(seconds)
