"""A server that is less than one: it accepts connections, and reads no request unless it is told to."""

import contextlib
import socket
import threading


@contextlib.contextmanager
def bare_server(answer):
    """Gives each connection to `answer`; its root URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = listener.accept()
                    with accepted, contextlib.suppress(OSError):
                        answer(accepted)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
