"""The server: listens, reads calls, asks the script, plays the reply; a thread per connection, all gone at `stop`."""

import contextlib
import json
import select
import socket
import threading
from collections import Counter
from types import MappingProxyType, TracebackType
from typing import Any, Self

from .defaults import Defaults
from .dialects import kind_of, texts_of
from .exchange import Exchange, Reply
from .log import Call, CallLog, EndedBy
from .script import Predicate, Script
from .wire import ClientClosed, Connection, Request, ServerCloses, StopSignal, response, to_json

LOG_PATH = "/__log__"


class ProviderServer(Script):
    """A scripted model server on 127.0.0.1, for one `with` block or from `start` to `stop`.

    Its keywords are those of `Defaults`, by which unscripted calls are answered. It listens from the moment it is
    made, so that `address` is known; it answers once started.
    """

    def __init__(self, defaults: Defaults | None = None, port: int = 0, **overrides: Any) -> None:
        super().__init__()
        self.defaults = defaults or Defaults(**overrides)
        self._log = CallLog()
        self._stop = StopSignal()
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._connections_accepted = 0
        self._reads = True
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name=f"provider-server-{self.port}", daemon=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """Refuse new connections, cut the open ones, and return when no thread is left. The log stays readable."""
        if self._stop.is_set:
            return
        self._stop.set()
        if self._acceptor.is_alive():
            self._acceptor.join()
        self._listener.close()
        with self._lock:
            open_connections = dict(self._connections)
        for connection in open_connections:
            connection.abort()
        for thread in open_connections.values():
            thread.join()
        self._stop.close()

    @property
    def address(self) -> str:
        """The root URL; the base URL of an Ollama provider."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        return f"{self.address}/v1"

    @property
    def gemini_url(self) -> str:
        return f"{self.address}/v1beta"

    def accept_never(self) -> None:
        """From now on connections are accepted and never read."""
        self._reads = False

    @property
    def calls(self) -> list[Call]:
        return self._log.calls()

    @property
    def embedding_calls(self) -> list[Call]:
        return self._log.calls("embedding")

    @property
    def chat_calls(self) -> list[Call]:
        return self._log.calls("chat")

    @property
    def in_flight(self) -> int:
        """Embedding calls that are open now."""
        return self._log.in_flight

    @property
    def peak_in_flight(self) -> int:
        """The most embedding calls that were ever open together."""
        return self._log.peak_in_flight

    @property
    def texts_seen(self) -> Counter[str]:
        """How often each text was sent for embedding."""
        return self._log.texts_seen

    @property
    def connections_accepted(self) -> int:
        return self._connections_accepted

    @property
    def open_connections(self) -> int:
        """Connections that neither side has closed yet."""
        with self._lock:
            return sum(not connection.client_has_closed() for connection in self._connections)

    def wait_for_calls(self, n: int, timeout: float = 30.0, predicate: Predicate = lambda call: True) -> list[Call]:
        """The calls for which `predicate` holds, once there are `n`; AssertionError after `timeout` seconds."""
        self._log.wait_for(lambda calls: sum(map(predicate, calls)) >= n, timeout)
        return [call for call in self.calls if predicate(call)]

    def wait_until_ended(self, number: int, timeout: float = 30.0) -> Call:
        """The call with this number, once it has ended; AssertionError after `timeout` seconds."""

        def ended(calls: list[Call]) -> bool:
            return any(call.number == number and not call.is_open for call in calls)

        return next(call for call in self._log.wait_for(ended, timeout) if call.number == number)

    def _accept(self) -> None:
        watch = select.poll()
        watch.register(self._listener, select.POLLIN)
        watch.register(self._stop, select.POLLIN)
        while True:
            watch.poll()
            if self._stop.is_set:
                return
            accepted, _ = self._listener.accept()
            connection = Connection(accepted, self._stop)
            thread = threading.Thread(target=self._converse, args=(connection,), daemon=True)
            with self._lock:
                self._connections_accepted += 1
                self._connections[connection] = thread
            thread.start()

    def _converse(self, connection: Connection) -> None:
        try:
            if not self._reads:
                with contextlib.suppress(ClientClosed, ServerCloses):
                    connection.wait(None)
                return
            while request := connection.read_request():
                if not self._serve(connection, request):
                    return
        finally:
            connection.close()
            with self._lock:
                del self._connections[connection]

    def _serve(self, connection: Connection, request: Request) -> bool:
        """Answer one request; whether the connection goes on."""
        path, _, query = request.target.partition("?")
        if path == LOG_PATH:
            return self._serve_log(connection, request.method)
        call = self._log.begin(connection.client_has_closed, **_fields(request, path, query))
        default = Reply("default", self.defaults.play)
        exchange = Exchange(call, connection, self._log, default, self.defaults.dimensions)
        ended_by: EndedBy = "server_closed"
        try:
            (self.decide(call) or default).play(exchange)
            ended_by = "replied"
        except ClientClosed:
            ended_by = "client_closed"
        except ServerCloses:
            pass
        finally:
            self._log.end(call.number, ended_by)
        return ended_by == "replied" and exchange.keep_alive

    def _serve_log(self, connection: Connection, method: str) -> bool:
        if method == "DELETE":
            self._log.clear()
        try:
            connection.send(response(200, to_json(self._log.summary())))
        except (ClientClosed, ServerCloses):
            return False
        return True


def unused_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def unused_address() -> str:
    """A root URL that refuses connections."""
    return f"http://127.0.0.1:{unused_port()}"


def _fields(request: Request, path: str, query: str) -> dict[str, Any]:
    """What the log keeps of a request."""
    kind = kind_of(request.method, path)
    try:
        body = json.loads(request.body) if request.body else None
    except ValueError:
        body = None
    return {
        "method": request.method,
        "path": path,
        "query": query,
        "headers": MappingProxyType(request.headers),
        "body": body,
        "kind": kind,
        "texts": texts_of(kind, body),
    }
