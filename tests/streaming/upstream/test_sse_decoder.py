"""The event stream decoder: framing, limits, and the same result however the bytes are cut."""

import itertools
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streaming.upstream.sse_decoder import (
    IncompleteSseEvent,
    SseDecodeError,
    SseDecoder,
    SseEventTooLongError,
    SseInvalidUtf8Error,
    SseLimits,
    SseLineTooLongError,
)

SMALL = SseLimits(max_line_bytes=24, max_event_bytes=32)


def decode(packets, limits=None):
    """(events as tuples, error code or None, incomplete event or None) of a stream in these packets."""
    decoder = SseDecoder(limits)
    events = []
    try:
        for packet in packets:
            for event in decoder.feed(packet):
                events.append((event.type, event.data, event.last_event_id))
        return events, None, decoder.finish()
    except SseDecodeError as error:
        return events, error.code, None


def data_of(stream):
    events, code, incomplete = decode([stream])
    assert (code, incomplete) == (None, None)
    return [data for _, data, _ in events]


def bytewise(stream):
    return [stream[at : at + 1] for at in range(len(stream))]


@pytest.mark.parametrize("newline", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_every_line_ending_frames_the_same_events(newline):
    stream = newline.join([b"data: one", b"", b"event: ping", b"data: two", b"data: three", b"", b""])
    expected = [("", "one", ""), ("ping", "two\nthree", "")]
    assert decode([stream]) == decode(bytewise(stream)) == (expected, None, None)


def test_a_cr_and_its_lf_in_different_packets_are_one_line_ending():
    assert decode([b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n"])[0] == [("", "a\nb", "")]


def test_a_bare_cr_completes_the_event_without_waiting_for_an_lf():
    assert [event.data for event in SseDecoder().feed(b"data: a\r\r")] == ["a"]


def test_the_first_event_after_a_bom_is_kept():
    stream = b"\xef\xbb\xbfdata: a\n\n"
    assert decode([stream]) == decode(bytewise(stream)) == ([("", "a", "")], None, None)
    assert data_of(b"data: a\n\n\xef\xbb\xbfdata: b\n\n") == ["a"]


def test_comments_and_retry_only_blocks_are_no_events_but_are_counted():
    decoder = SseDecoder()
    assert list(decoder.feed(b": PROCESSING\n\nretry: 1000\n\n: ping\n\nretry: soon\n\n")) == []
    assert (decoder.comments, decoder.events, decoder.retry_ms) == (2, 0, 1000)
    assert decoder.bytes_received == 48


def test_a_blank_line_after_nothing_but_an_id_is_no_event_and_the_id_is_sticky():
    events, _, _ = decode([b"id: 7\ndata: a\n\n: ping\n\nid: 8\n\ndata: b\n\nid: 9\0\ndata: c\n\nid\ndata: d\n\n"])
    assert events == [("", "a", "7"), ("", "b", "8"), ("", "c", "8"), ("", "d", "")]


def test_empty_data_is_an_event_with_empty_data():
    assert data_of(b"data:\n\ndata: \n\ndata\n\ndata:\ndata:\n\n") == ["", "", "", "\n"]


def test_the_event_type_belongs_to_one_event_only():
    events, _, _ = decode([b"event: error\ndata: a\n\ndata: b\n\nevent: lost\n\ndata: c\n\n"])
    assert [event[0] for event in events] == ["error", "", ""]


def test_only_one_leading_space_is_framing():
    assert data_of(b"data:  a \n\ndata:b:c\n\n") == [" a ", "b:c"]


def test_a_multibyte_character_split_between_packets_is_whole():
    stream = "data: äöü 漢字 🦆\n\n".encode()
    assert decode(bytewise(stream))[0] == [("", "äöü 漢字 🦆", "")]


@pytest.mark.parametrize("field", [b"data: \xff", b"event: \xff\ndata: a", b"id: \xff\ndata: a"])
def test_invalid_utf8_is_a_named_error_after_the_events_before_it(field):
    assert decode([b"data: ok\n\n" + field + b"\n\n"]) == ([("", "ok", "")], SseInvalidUtf8Error.code, None)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b"data: last", b"last"),
        (b"data: last\n", b"last"),
        (b"data: one\ndata: tw", b"one\ntw"),
        ("data: ü".encode()[:-1], b"\xc3"),
    ],
)
def test_an_event_without_its_blank_line_is_reported_as_incomplete(tail, expected):
    events, code, incomplete = decode([b"data: ok\n\n", tail])
    assert (events, code) == ([("", "ok", "")], None)
    assert incomplete == IncompleteSseEvent(type=b"", data=expected)


@pytest.mark.parametrize("tail", [b"", b": comment", b"event: error", b"id: \xff", b"dat", b"data: ok\n\n"])
def test_nothing_is_incomplete_where_no_data_is_pending(tail):
    assert decode([tail])[1:] == (None, None)


def test_an_eight_megabyte_line_passes():
    text = b"x" * (8 * 1024 * 1024)
    stream = b"data: " + text + b"\n\n"
    packets = [stream[at : at + 1460] for at in range(0, len(stream), 1460)]
    events, code, _ = decode(packets)
    assert code is None
    assert [len(data) for _, data, _ in events] == [len(text)]


def test_an_endless_line_is_a_named_error_in_bounded_memory():
    tracemalloc.start()
    try:
        with pytest.raises(SseLineTooLongError) as caught:
            _feed_for_ever(b"x" * 4096, SseLimits(max_line_bytes=1_000_000))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.limit_bytes == 1_000_000


@pytest.mark.parametrize("packet", [b"data: \n" * 600, b"data\n" * 600, b"data: ab\n" * 600])
def test_an_endless_event_is_a_named_error_in_bounded_memory(packet):
    tracemalloc.start()
    try:
        with pytest.raises(SseEventTooLongError):
            _feed_for_ever(packet, SseLimits(max_event_bytes=100_000))
        assert tracemalloc.get_traced_memory()[1] < 800_000
    finally:
        tracemalloc.stop()


def test_comments_for_ever_hold_no_memory():
    decoder = SseDecoder()
    tracemalloc.start()
    try:
        for _ in range(5_000):
            assert list(decoder.feed(b": ping\n\n" * 20)) == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert decoder.comments == 100_000


def _feed_for_ever(packet, limits):
    decoder = SseDecoder(limits)
    for _ in range(100_000):
        for _ in decoder.feed(packet):
            raise AssertionError("an endless event was dispatched")
    raise AssertionError("no limit")


# --- any byte stream, cut anywhere -----------------------------------------------------------------------------------
LINES = st.sampled_from(
    [
        *(
            b"data: a",
            b"data:",
            b"data",
            b"data: \xc3\xa4",
            b"data: \xff",
            b"event: error",
            b": c",
            b"id: 1",
            b"id: \0",
        ),
        *(b"retry: 5", b"unknown: x", b"data: " + b"y" * 30, b"data: 0123456789", b"", b"", b"\xef\xbb\xbf"),
    ]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n", b""])
EVENTFUL = st.lists(st.tuples(LINES, ENDS), max_size=25).map(lambda parts: b"".join(a + b for a, b in parts))
STREAMS = st.one_of(EVENTFUL, st.binary(max_size=80), st.binary(max_size=20).flatmap(lambda b: EVENTFUL.map(b.__add__)))


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 400), max_size=12))
@example(stream=b"\xef\xbb\xbf" + b"y" * 23, cuts=[1, 2, 25])
@example(stream=b"data: a\r\ndata: b\r\n\r\n", cuts=[8, 17, 18, 19])
@settings(max_examples=200, deadline=None)
def test_any_cut_gives_the_same_events_or_the_same_named_error(stream, cuts):
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    packets = [stream[a:b] for a, b in itertools.pairwise(edges)]
    whole = decode([stream], SMALL)
    assert decode(packets, SMALL) == whole
    assert decode(bytewise(stream), SMALL) == whole


@given(stream=STREAMS)
@settings(max_examples=150, deadline=None)
def test_the_events_are_those_of_a_plain_reading_of_the_format(stream):
    events, code, _ = decode(bytewise(stream), SseLimits())
    expected, expected_code = plainly(stream)
    assert (events, code) == (expected, expected_code)


def plainly(stream):
    """The format, line by line over the whole stream, as its specification words it."""
    events, data, event_type, last_id = [], [], b"", ""
    lines = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]
    try:
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not line:
                if data:
                    events.append((event_type.decode(), b"\n".join(data).decode(), last_id))
                data, event_type = [], b""
            elif name == b"data":
                data.append(value)
            elif name == b"event":
                event_type = value
            elif name == b"id" and b"\0" not in value:
                last_id = value.decode()
    except UnicodeDecodeError:
        return events, SseInvalidUtf8Error.code
    return events, None


class ForgetsTheCr(SseDecoder):
    """The twin: takes each packet's first LF for a line ending of its own."""

    def feed(self, packet):
        self._skip_lf = False
        return super().feed(packet)


def test_a_decoder_that_forgets_the_cr_ends_an_event_twice_as_soon():
    twin = ForgetsTheCr()
    packets = [b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n"]
    assert [event.data for packet in packets for event in twin.feed(packet)] == ["a", "b"]


class Unbounded(SseDecoder):
    """The twin: no limit on a line."""

    def _check_line(self, length):
        pass


def test_a_decoder_without_its_line_limit_holds_an_endless_line():
    twin = Unbounded(SseLimits(max_line_bytes=100_000))
    for _ in range(100):
        assert list(twin.feed(b"x" * 4096)) == []
    assert len(twin._partial) == 409_600
