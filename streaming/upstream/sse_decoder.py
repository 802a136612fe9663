"""Server-sent events, decoded incrementally from bytes in bounded memory (docs/architecture.md, Chat).

Pure: bytes in, events out. However a byte stream is cut into packets, it gives the same events, or the same events
and then the same named error. Framing follows the WHATWG's event stream format, except that invalid UTF-8 is an error
instead of a replacement character, and that an event cut off by the end of the stream is reported, not dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

_BOM = b"\xef\xbb\xbf"
_CR = 13
_LF = 10
_MIB = 1024 * 1024


class SseDecodeError(Exception):
    """The bytes are not an event stream that this decoder accepts. `code` says why."""

    code: ClassVar[str] = "SSE_DECODE_ERROR"
    kind: ClassVar[str] = "decode_error"


class SseLineTooLongError(SseDecodeError):
    """One line is longer than `limit_bytes`; it may have no end at all."""

    code = "SSE_LINE_TOO_LONG"
    kind = "line_too_long"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"an event stream line is longer than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class SseEventTooLongError(SseDecodeError):
    """The `data:` lines of one event add up to more than `limit_bytes`."""

    code = "SSE_EVENT_TOO_LONG"
    kind = "event_too_long"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"one event's data is longer than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class SseInvalidUtf8Error(SseDecodeError):
    """A field of an event is not UTF-8."""

    code = "SSE_INVALID_UTF8"
    kind = "invalid_utf8"

    def __init__(self) -> None:
        super().__init__("an event stream field is not valid UTF-8")


@dataclass(frozen=True)
class SseLimits:
    """The memory one decoder may hold, in bytes: a pending line, and the data of a pending event."""

    max_line_bytes: int = 16 * _MIB
    max_event_bytes: int = 16 * _MIB


@dataclass(slots=True)
class SseEvent:
    """One dispatched event. `type` is empty when unnamed; `last_event_id` is sticky; `data` may be empty."""

    type: str
    data: str
    last_event_id: str


@dataclass(frozen=True, slots=True)
class IncompleteSseEvent:
    """What stood in the buffers when the stream ended: an event without its blank line, not decoded."""

    type: bytes
    data: bytes


class SseDecoder:
    """Feed it packets, iterate the events. Counts what it read, so that a watchdog can tell comments from progress."""

    __slots__ = (
        "_at_start",
        "_data",
        "_event_type",
        "_last_event_id",
        "_limits",
        "_partial",
        "_skip_lf",
        "bytes_received",
        "comments",
        "events",
        "retry_ms",
    )

    def __init__(self, limits: SseLimits | None = None) -> None:
        self.bytes_received = 0
        self.comments = 0
        self.events = 0
        self.retry_ms: int | None = None
        self._limits = limits or SseLimits()
        self._partial = bytearray()
        self._skip_lf = False
        self._at_start = True
        self._data: bytes | bytearray | None = None
        self._event_type = b""
        self._last_event_id = ""

    def feed(self, packet: bytes) -> Iterator[SseEvent]:
        """The events that this packet completes. Exhaust it before the next packet.

        Raises an SseDecodeError at the place of the fault, after the events that stand before it.
        """
        self.bytes_received += len(packet)
        if self._skip_lf and packet:
            self._skip_lf = False
            if packet[0] == _LF:
                packet = packet[1:]
        if not packet:
            return
        ended = packet[-1] == _LF or packet[-1] == _CR
        self._skip_lf = packet[-1] == _CR
        lines = packet.splitlines()
        rest = b"" if ended else lines.pop()
        for line in self._continued(lines):
            event = self._take_line(line)
            if event is not None:
                yield event
        self._partial += rest
        self._check_line(len(self._partial))

    def finish(self) -> IncompleteSseEvent | None:
        """At the end of the stream: the event that its blank line never completed, if it has any data.

        Its last line may be cut anywhere. Raises SseEventTooLongError.
        """
        line = bytes(self._partial).removeprefix(_BOM if self._at_start else b"")
        self._partial.clear()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._append_data(value.removeprefix(b" "))
        if self._data is None:
            return None
        incomplete = IncompleteSseEvent(type=self._event_type, data=bytes(self._data))
        self._data, self._event_type = None, b""
        return incomplete

    def _continued(self, lines: list[bytes]) -> list[bytes]:
        """The completed lines, the first of them joined to what was pending."""
        if lines and self._partial:
            self._partial += lines[0]
            lines[0] = bytes(self._partial)
            self._partial = bytearray()
        return lines

    def _take_line(self, line: bytes) -> SseEvent | None:
        self._check_line(len(line))
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        if line.startswith(b"data:"):
            self._append_data(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b":"):
            self.comments += 1
        else:
            self._take_field(line)
        return None

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._append_data(value)
        elif name == b"event":
            self._event_type = value
        elif name == b"id" and b"\0" not in value:
            self._last_event_id = _decoded(value)
        elif name == b"retry" and value.isdigit() and len(value) < 10:
            self.retry_ms = int(value)

    def _append_data(self, value: bytes) -> None:
        limit = self._limits.max_event_bytes
        if self._data is None:
            if len(value) > limit:
                raise SseEventTooLongError(limit)
            self._data = value
            return
        if len(self._data) + 1 + len(value) > limit:
            raise SseEventTooLongError(limit)
        if isinstance(self._data, bytes):  # A second line: only now is a growing buffer worth its copy.
            self._data = bytearray(self._data)
        self._data += b"\n" + value

    def _dispatch(self) -> SseEvent | None:
        data, event_type = self._data, self._event_type
        self._data, self._event_type = None, b""
        if data is None:
            return None
        self.events += 1
        return SseEvent(_decoded(event_type) if event_type else "", _decoded(data), self._last_event_id)

    def _check_line(self, length: int) -> None:
        if length > self._limits.max_line_bytes:
            raise SseLineTooLongError(self._limits.max_line_bytes)


def _decoded(value: bytes | bytearray) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise SseInvalidUtf8Error from error
