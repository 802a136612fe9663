"""The server as a process of its own: `python -m tests.support.provider_server --port 8089 --latency 0.05`."""

import argparse
import signal
import sys
import threading

from . import Defaults, ProviderServer, hang


def main() -> None:
    options = _options()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    defaults = Defaults(
        dimensions=options.dimensions,
        latency=options.latency,
        chat_chunks=options.chat_chunks,
        chat_interval=options.chat_interval,
    )
    with ProviderServer(defaults, port=options.port) as server:
        if options.hang:
            server.when(lambda call: call.kind == "embedding", hang())
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        ended.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.provider_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds from an embedding call to its reply")
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--chat-chunks", type=int, default=0, help="text deltas of a streamed answer")
    parser.add_argument("--chat-interval", type=float, default=0.0, help="seconds between two of them")
    parser.add_argument("--hang", action="store_true", help="never answer an embedding call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
