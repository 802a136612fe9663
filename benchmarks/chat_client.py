"""`python -m benchmarks.chat_client BASE_URL MODEL STREAMS READER [OVER LONGEST]`: streams of one chat server at the
same time, started evenly over OVER seconds (0) and given up LONGEST seconds after the first (600).

READER is `sdk`, the official client's own loop, or `raw`, which uses so little CPU that it does not limit the server.
The key is read from BENCH_CHAT_KEY. Prints one JSON object: the timings of every stream, by `chat_server`'s time stamps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

_STAMP = re.compile(r"@(\d+) ")
_QUESTION = "How does the lane decide?"


@dataclass
class StreamTimes:
    """One stream: seconds to its first text and to its end, each delta's delay in milliseconds, and its error."""

    first_s: float | None = None
    total_s: float = 0.0
    delays_ms: list[float] = field(default_factory=list)
    error: str = "not finished in time"

    def add(self, text: str, began: float) -> None:
        now = time.monotonic_ns()
        for stamp in _STAMP.findall(text):
            self.delays_ms.append(round((now - int(stamp)) / 1e6, 2))
        if self.delays_ms and self.first_s is None:
            self.first_s = time.monotonic() - began


Texts = Callable[[], AsyncIterator[str]]


def main() -> None:
    base_url, model, streams, reader, *times = sys.argv[1:]
    over_s, longest_s = map(float, times or (0, 600))
    key = os.environ.get("BENCH_CHAT_KEY", "none")
    began = time.monotonic()
    texts = {"sdk": _sdk, "raw": _raw}[reader](base_url, model, key)
    seen = asyncio.run(_all(texts, int(streams), over_s, longest_s))
    print(json.dumps({"seconds": time.monotonic() - began, "streams": [asdict(each) for each in seen]}))


async def _all(texts: Texts, streams: int, over_s: float, longest_s: float) -> list[StreamTimes]:
    seen = [StreamTimes() for _ in range(streams)]
    each = [_one(texts, one, over_s * number / streams) for number, one in enumerate(seen)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await asyncio.gather(*each)
    return seen


async def _one(texts: Texts, seen: StreamTimes, after_s: float) -> None:
    await asyncio.sleep(after_s)
    began = time.monotonic()
    try:
        async for text in texts():
            seen.add(text, began)
        seen.error = ""
    except Exception as error:  # Any error is a result of this stream, and is reported.
        seen.error = f"{type(error).__name__}: {error}"[:200]
    seen.total_s = time.monotonic() - began


def _sdk(base_url: str, model: str, key: str) -> Texts:
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=600.0)

    async def texts() -> AsyncIterator[str]:
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": _QUESTION}], stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    return texts


def _raw(base_url: str, model: str, key: str) -> Texts:
    url = urlsplit(base_url)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": _QUESTION}], "stream": True})
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )

    async def texts() -> AsyncIterator[str]:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write((head + body).encode())
        text = ""
        while packet := await reader.read(1 << 16):
            text += packet.decode()
            complete, mark, text = text.rpartition("\n")
            yield complete + mark
            if "data: [DONE]" in complete:
                writer.close()
                return
        raise EOFError(f"the stream ended without [DONE]: {text[-200:]}")

    return texts


if __name__ == "__main__":
    main()
