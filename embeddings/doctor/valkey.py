"""Checks of Valkey or Redis, and of the workers behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from urllib.parse import urlsplit

from django.conf import settings

from embeddings.doctor.findings import Finding, Status, check, error, ok
from embeddings.runtime import valkey, wake_ups, workers
from project.runtime.embedded import EmbeddedValkeyError, valkey_socket

# Ask twice before reporting no worker: a busy machine may answer late once.
_ASK_S = (1.0, 2.0)


def valkey_address() -> str:
    """The server's address without its password."""
    if settings.EMBEDDED_VALKEY:
        return f"embedded at {valkey_socket(settings.VAR_DIR)}"
    url = urlsplit(settings.REDIS_URL)
    port = f":{url.port}" if url.port else ""
    return f"{url.scheme}://{url.hostname or ''}{port}{url.path}"


@check("valkey")
def check_valkey() -> Iterable[Finding]:
    """Whether it answers. The embedded server is started on demand, so it is started here too."""
    try:
        valkey.client().ping()
    except EmbeddedValkeyError as raised:
        yield error("valkey", str(raised), f"look at {settings.VAR_DIR / 'valkey' / 'valkey.log'}")
    except valkey.UNREACHABLE as raised:
        detail = f"{valkey_address()} does not answer: {type(raised).__name__}"
        yield error("valkey", detail, "start it, or correct REDIS_URL")
    else:
        yield ok("valkey", "answers: broker, event logs, waiting callers")


@check("queues", bound_s=sum(_ASK_S) + 2.0)
def check_queues() -> Iterable[Finding]:
    """How many workers take each queue. With an embedded Valkey and no worker, commands do the work themselves."""
    found: Counter[str] = Counter()
    if not wake_ups.no_worker_listens():
        for seconds in _ASK_S:
            found = workers.takers_by_queue(seconds)
            if all(found[queue] for queue in workers.queues()):
                break
    is_missed = bool(found) or not settings.EMBEDDED_VALKEY
    for queue in workers.queues():
        if found[queue]:
            yield ok(f"queue {queue}", f"{found[queue]} {'worker takes' if found[queue] == 1 else 'workers take'} it")
        else:
            status = Status.ERROR if is_missed else Status.WARNING
            yield Finding(f"queue {queue}", status, "no worker takes it", workers.START.get(queue, ""))
