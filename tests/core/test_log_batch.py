"""Batches there and back, against the plain reference; and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.threads import at_once
from tools import log_reference as reference
from txnkv.core import (
    MESSAGES,
    Chunk,
    CommittedFilter,
    ControlType,
    CoreError,
    LastKeys,
    all_data,
    check_batch,
    crc32c,
    decode,
    decode_headers,
    encode_batch,
    encode_control,
    encode_headers,
    message_batch,
    message_size,
    place,
    put_message,
    read_chunk,
    read_control,
    read_header,
    walk,
)

STAMP = pa.timestamp("us", "UTC")
CODECS = [None, "lz4", "zstd"]

blobs = st.binary(max_size=20)
rows = st.builds(
    reference.Row,
    value=st.none() | blobs,
    key=st.none() | blobs,
    headers=st.none() | blobs,
    time=st.none() | st.integers(0, 5),
)


def record_batch(rows, columns=("value", "key", "headers", "timestamp"), padding=0):
    """The rows as Arrow, behind `padding` others, which a slice then hides."""
    others = [reference.Row(b"other", b"other", b"other", 99)] * padding
    names = {"value": "value", "key": "key", "headers": "headers", "timestamp": "time"}
    arrays = {
        name: pa.array(
            [getattr(row, names[name]) for row in [*others, *rows]],
            STAMP if name == "timestamp" else pa.binary(),
        )
        for name in columns
    }
    return pa.record_batch(arrays).slice(padding)


def messages(*values):
    return pa.record_batch({"value": pa.array(values, pa.binary())})


def tuples(batch):
    columns = [batch.column(i) for i in range(batch.num_columns)]
    columns[1] = columns[1].cast(pa.int64())
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def decode_all(buf, from_offset=0, limit=None):
    batch = decode(buf, all_data(buf, from_offset, 1 << 62), from_offset, limit)
    assert batch.schema == MESSAGES
    batch.validate(full=True)
    return tuples(batch)


# -- there and back ------------------------------------------------------------------------------


@given(st.lists(rows, min_size=1, max_size=20), st.integers(0, 3), st.integers(0, 1 << 62))
def test_same_bytes_as_the_reference(rows, padding, txn_id):
    encoded = encode_batch(record_batch(rows, padding=padding), timestamp=3, txn_id=txn_id)
    assert encoded == reference.encode_batch(rows, 3, txn_id)


@given(
    st.lists(st.tuples(rows, st.integers(0, 2)), min_size=1, max_size=20),
    st.integers(0, 3),
    st.integers(0, 70),
    st.none() | st.integers(0, 20),
)
def test_places(pairs, behind, from_offset, limit):
    """Gaps before and between messages, and behind the last one."""
    found = [row for row, _ in pairs]
    places = [i + sum(gap for _, gap in pairs[: i + 1]) for i in range(len(pairs))]
    count = places[-1] + 1 + behind
    encoded = encode_batch(
        record_batch(found), timestamp=3, places=pa.array(places, pa.uint32()), count=count
    )
    assert encoded == reference.encode_batch(found, 3, places=places, count=count)
    plain = reference.encode_batch(found, 3)
    seen = [m for b in reference.batches(reference.place(encoded + plain, 7)) for m in b.messages]
    wanted = [tuple(message) for message in seen if message.offset >= from_offset]
    assert decode_all(place(encoded + plain, 7), from_offset, limit) == wanted[:limit]


def test_places_are_among_the_offsets_that_are_taken():
    places = pa.array([0, 5], pa.uint32())
    with pytest.raises(ValueError, match="up to place 5 of 5"):
        encode_batch(messages(b"a", b"b"), timestamp=1, places=places, count=5)


@given(st.lists(st.lists(rows, min_size=1, max_size=20), min_size=1, max_size=5), st.integers(0, 5))
def test_last_keys(parts, oldest):
    """Against a dict."""
    table, last, at, batches = LastKeys(), {}, 0, []
    for part in parts:
        buf = place(encode_batch(record_batch(part), timestamp=3), at)
        batches.append(decode(buf, all_data(buf, 0, 1 << 62), 0))
        table.note(batches[-1])
        last |= {row.key: at + i for i, row in enumerate(part) if row.key is not None}
        at += len(part)
    assert len(table) == len(last)
    assert all(table.last(key) == offset for key, offset in last.items())
    assert table.last(b"no such key") == table.last(None) == -1
    for batch in [*batches, batches[0].slice(1), batches[-1].slice(0, 0)]:
        kept = [
            i
            for i, (offset, time, key, value, *_) in enumerate(tuples(batch))
            if key is None or (last[key] <= offset and not (value is None and time < oldest))
        ]
        assert table.choose(batch, oldest).to_pylist() == kept


@given(st.lists(rows, min_size=1, max_size=20), st.sampled_from(["value", "value key", "headers"]))
def test_columns_may_be_absent(rows, which):
    columns = {"value", *which.split()}
    kept = [
        reference.Row(
            row.value,
            row.key if "key" in columns else None,
            row.headers if "headers" in columns else None,
        )
        for row in rows
    ]
    encoded = encode_batch(record_batch(rows, sorted(columns)), timestamp=3)
    assert encoded == reference.encode_batch(kept, 3)


@given(
    st.lists(
        st.tuples(st.lists(rows, min_size=1, max_size=8), st.sampled_from(CODECS), st.booleans()),
        max_size=5,
    ),
    st.integers(0, 50),
    st.none() | st.integers(0, 20),
)
def test_decoding_gives_what_was_encoded(parts, from_offset, limit):
    buf, plain = b"", b""
    for i, (rows, codec, is_chunk) in enumerate(parts):
        chunk = Chunk(i, 0, 1, 2) if is_chunk else None
        batch = record_batch(rows)
        buf += encode_batch(batch, timestamp=3, txn_id=i, codec=codec, chunk=chunk)
        plain += reference.encode_batch(rows, 3, i)
    seen = [m for b in reference.batches(reference.place(plain, 7)) for m in b.messages]
    wanted = [tuple(message) for message in seen if message.offset >= from_offset]
    assert decode_all(place(buf, 7), from_offset, limit) == wanted[:limit]


@pytest.mark.parametrize("codec", CODECS[1:])
def test_compression_is_kept_where_it_helps(codec):
    large, small = messages(b"x" * 10_000), messages(b"")
    packed = encode_batch(large, timestamp=1, codec=codec)
    assert len(packed) < 500
    assert read_header(packed).codec == codec
    assert decode_all(packed)[0][3] == b"x" * 10_000
    plain = encode_batch(small, timestamp=1, codec=codec)
    assert plain == encode_batch(small, timestamp=1)


def test_other_types_are_cast():
    strings = pa.record_batch(
        {
            "value": pa.array(["a", "b"]),
            "key": pa.array([b"k", None], pa.large_binary()),
            "timestamp": pa.array([1, 2], pa.timestamp("ms", "UTC")),
        }
    )
    encoded = encode_batch(strings, timestamp=5)
    assert decode_all(encoded) == [(0, 1000, b"k", b"a", None, 0), (1, 2000, None, b"b", None, 0)]


def test_nulls_with_bytes_under_them_leave_no_trace():
    ends = b"".join(end.to_bytes(4, "little") for end in (0, 1, 7, 8))
    buffers = [pa.py_buffer(part) for part in (b"\x05", ends, b"asecretb")]
    values = pa.Array.from_buffers(pa.binary(), 3, buffers)
    encoded = encode_batch(pa.record_batch({"value": values}), timestamp=5)
    assert b"secret" not in encoded
    assert encoded == encode_batch(messages(b"a", None, b"b"), timestamp=5)


def test_what_is_decoded_lives_on_its_own():
    buf = bytearray(encode_batch(messages(b"abc", b"def"), timestamp=1))
    batch = decode(buf, all_data(buf, 0, 9), 0)
    buf[80:] = bytes(len(buf) - 80)
    assert batch.column("value").to_pylist() == [b"abc", b"def"]


# -- headers, places, control --------------------------------------------------------------------


def test_header():
    encoded = encode_batch(
        record_batch([reference.Row(b"a", time=8), reference.Row(b"b", time=4)]),
        timestamp=6,
        txn_id=9,
        decided=True,
        producer_id=(1 << 64) - 1,
        epoch=65535,
        base_sequence=(1 << 31) - 1,
    )
    header = read_header(place(encoded, 100, 55))
    assert header.base_offset == 100
    assert (header.last_offset, header.next_offset) == (101, 102)
    assert (header.commit_ts, header.length) == (55, len(encoded))
    assert (header.txn_id, header.count, header.rows) == (9, 2, 2)
    assert (header.base_timestamp, header.max_timestamp) == (4, 8)
    assert (header.producer_id, header.epoch) == ((1 << 64) - 1, 65535)
    assert (header.base_sequence, header.raw_bytes) == ((1 << 31) - 1, len(encoded) - 80)
    assert header.is_transactional
    assert header.is_decided
    assert not header.is_control
    assert not header.is_chunk


def test_place_and_walk():
    batches = [
        encode_batch(messages(b"a", b"b"), timestamp=1),
        encode_control(ControlType.FILLER, timestamp=1, count=10),
        encode_batch(messages(b"c"), timestamp=1, txn_id=3),
    ]
    buf = b"".join(batches)
    placed = place(buf, 5, 77)
    assert placed == reference.place(buf, 5, 77)
    assert read_header(buf).base_offset == 0  # a copy was placed
    found = walk(placed)
    assert [at for at, _ in found] == [0, len(batches[0]), len(batches[0] + batches[1])]
    assert [header.base_offset for _, header in found] == [5, 7, 17]
    assert {header.commit_ts for _, header in found} == {77}
    assert walk(placed, found[1][0]) == found[1:]
    assert walk(place(placed, 6)) == [
        (at, header._replace(base_offset=header.base_offset + 1)) for at, header in found
    ]
    for at, _ in found:
        check_batch(placed, at)
    assert place(memoryview(placed)[: found[1][0]], 0) == place(batches[0], 0, 77)
    assert place(b"", 5) == b""
    assert walk(b"") == []


def test_control():
    encoded = encode_control(
        ControlType.ABORT, txn_id=4, timestamp=1, low_water_mark=3, first_offset=9
    )
    assert read_control(encoded) == (ControlType.ABORT, 3, 9, b"")
    assert read_header(encoded).is_control
    listed = encode_control(ControlType.SIDE_LIST, txn_id=4, timestamp=1, count=3, body=b"xyz")
    assert read_control(encoded + listed, len(encoded)).body == b"xyz"
    assert read_control(pa.py_buffer(encoded)).type is ControlType.ABORT


def test_chunk():
    chunk = Chunk(1 << 63, 2, 5, 1 << 40)
    for codec in CODECS:
        encoded = encode_batch(messages(b"x" * 500), timestamp=1, codec=codec, chunk=chunk)
        assert read_chunk(encoded) == chunk
        assert read_header(encoded).is_chunk
    assert read_chunk(encode_batch(messages(b"x"), timestamp=1)) is None


def test_threads_encode_and_decode_at_once():
    batch = messages(*[b"value %d" % i for i in range(5000)])
    wanted = encode_batch(batch, timestamp=1)
    wrong = []

    def work():
        for _ in range(20):
            encoded = encode_batch(batch, timestamp=1)
            back = decode(encoded, all_data(encoded, 0, 1 << 62), 0)
            if encoded != wanted or back.column("value") != batch.column("value"):
                wrong.append(encoded)

    at_once(*[work] * 4)
    assert not wrong


# -- headers of messages -------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(), st.binary()), max_size=10))
def test_message_headers(headers):
    assert decode_headers(encode_headers(headers)) == headers


def test_message_headers_that_are_none():
    assert decode_headers(None) == decode_headers(b"") == []
    assert encode_headers([]) == b""


@given(st.binary(min_size=1, max_size=30))
def test_message_headers_damaged(blob):
    try:
        headers = decode_headers(blob)
    except CoreError:
        return
    assert encode_headers(headers) == blob or blob == b"\0\0"


def test_message_headers_refused():
    with pytest.raises(TypeError, match="str and bytes"):
        encode_headers([("a", "b")])
    with pytest.raises(TypeError, match="str and bytes"):
        encode_headers([(b"a", b"b")])
    with pytest.raises(ValueError, match="65535"):
        encode_headers([("a", b"")] * 65536)
    with pytest.raises(ValueError, match="65535"):
        encode_headers([("a" * 65536, b"")])


# -- refused -------------------------------------------------------------------------------------


def test_refused_arguments():
    one = messages(b"a")
    with pytest.raises(ValueError, match="no messages"):
        encode_batch(messages(), timestamp=1)
    with pytest.raises(ValueError, match="'value' is missing"):
        encode_batch(pa.record_batch({"key": pa.array([b"a"])}), timestamp=1)
    with pytest.raises(ValueError, match="column 'colour'"):
        encode_batch(pa.record_batch({"colour": pa.array([b"a"])}), timestamp=1)
    with pytest.raises(ValueError, match="'snappy'"):
        encode_batch(one, timestamp=1, codec="snappy")
    with pytest.raises(ValueError, match="txn_id"):
        encode_batch(one, timestamp=1, decided=True)
    for wrong in ({"txn_id": -1}, {"epoch": 65536}, {"base_sequence": 1 << 31}):
        with pytest.raises(OverflowError):
            encode_batch(one, timestamp=1, **wrong)
    with pytest.raises(ValueError, match="offsets"):
        encode_control(ControlType.FILLER, timestamp=1, count=0)
    with pytest.raises(ValueError, match="4"):
        encode_control(4, timestamp=1)


def test_offsets_end():
    batch = encode_batch(messages(b"a"), timestamp=1)
    assert read_header(place(batch, (1 << 63) - 2)).next_offset == (1 << 63) - 1
    with pytest.raises(CoreError, match="2\\^63"):
        place(batch, (1 << 63) - 1)


def test_damaged_bytes():
    batch = encode_batch(messages(b"abc", b"def"), timestamp=1)
    flipped = bytearray(batch)
    flipped[-1] ^= 1
    spans = all_data(batch, 0, 9)
    for call in (check_batch, lambda buf: decode(buf, spans, 0)):
        with pytest.raises(CoreError):
            call(flipped)
    for cut in (batch[:79], batch[:-1]):
        for call in (read_header, check_batch, walk, lambda buf: place(buf, 1)):
            with pytest.raises(CoreError):
                call(cut)
    for at in (-1, len(batch), len(batch) + 1):
        with pytest.raises(CoreError):
            read_header(batch, at)
    with pytest.raises(CoreError):
        walk(batch, len(batch) + 1)
    with pytest.raises(CoreError, match="no control"):
        read_control(batch)


@given(
    st.lists(rows, min_size=1, max_size=8),
    st.sampled_from(CODECS),
    st.lists(st.tuples(st.integers(20, 300), st.integers(0, 255)), max_size=4),
)
def test_forged_bytes_give_an_error_or_an_answer(rows, codec, changes):
    forged = bytearray(encode_batch(record_batch(rows), timestamp=1, txn_id=5, codec=codec))
    for at, byte in changes:
        forged[20 + (at - 20) % (len(forged) - 20)] = byte
    forged[16:20] = crc32c(forged[20:]).to_bytes(4, "little")
    try:
        decode_all(bytes(forged))
        CommittedFilter().keep(forged, [(5, 0)], 0, 1 << 62)
    except (CoreError, MemoryError):
        return
    check_batch(forged)


def test_a_body_that_does_not_decompress():
    packed = bytearray(encode_batch(messages(b"x" * 10_000), timestamp=1, codec="zstd"))
    packed[80:90] = bytes(10)
    packed[16:20] = crc32c(packed[20:]).to_bytes(4, "little")
    with pytest.raises(CoreError, match="decompress"):
        decode_all(bytes(packed))


def test_control_of_a_later_version():
    control = bytearray(encode_control(ControlType.ABORT, txn_id=4, timestamp=1))
    control[82] = 9
    control[16:20] = crc32c(control[20:]).to_bytes(4, "little")
    with pytest.raises(CoreError, match="type 9"):
        read_control(control)


_FIELDS = st.none() | st.binary(max_size=20) | st.sampled_from([b"8 bytes.", bytes(1000)])


@given(st.lists(st.binary(max_size=20) | st.tuples(_FIELDS, _FIELDS), min_size=1, max_size=70))
@example([b""])
@example([(None, None)])
@example([(None, b"")] * 65)
def test_messages_of_python_are_encoded_as_those_of_arrow(rows: list[Any]) -> None:
    pairs = [row if isinstance(row, tuple) else (row, None) for row in rows]
    columns = {"value": pa.array([value for value, _ in pairs], pa.binary())}
    if keyed := any(key is not None for _, key in pairs):
        columns["key"] = pa.array([key for _, key in pairs], pa.binary())
    for txn_id, decided in ((0, False), (7, False), (7, True)):
        wanted = encode_batch(pa.record_batch(columns), timestamp=5, txn_id=txn_id, decided=decided)
        given = message_batch(rows, 5, txn_id, decided)
        assert given == wanted
    check_batch(given)
    assert message_size(rows) == (sum(len(one or b"") for pair in pairs for one in pair), keyed)


def test_messages_with_more_than_a_key_have_no_size():
    assert message_size([b"v", (b"v", None, 1, None, None)]) is None
    with pytest.raises(ValueError, match="more than a value and a key"):
        message_batch([(b"v", None, 1, None, None)], 5, 0, False)


@pytest.mark.parametrize("rows", [[], (b"v",), ["text"], [(b"v", 1)]])
def test_other_things_are_no_messages(rows: Any) -> None:
    for call in (message_size, lambda rows: message_batch(rows, 5, 0, False)):
        with pytest.raises(TypeError):
            call(rows)


_GIVEN = {
    "bytes": (b"v", None, b"v"),
    "text": ("v\u20ac", None, "v\u20ac".encode()),
    "with a key": (b"v", "k", (b"v", b"k")),
    "no value": (None, b"k", (None, b"k")),
    "nothing": (None, None, (None, None)),
    "text that is no UTF-8": ("\ud800", None, None),
    "a key of that": (b"v", "\ud800", None),
    "another kind": (1, None, None),
    "a key of another kind": (b"v", 1, None),
    "bytes of another class": (bytearray(b"v"), None, None),
    "too much to say at sight": (bytes((1 << 24) + 1), None, None),
}


@pytest.mark.parametrize("name", _GIVEN)
@pytest.mark.parametrize("left", [math.inf, 100.0, 100, 1.0, 0, -5.0])
def test_a_message_is_put_where_there_is_room(name: str, left: float) -> None:
    value, key, row = _GIVEN[name]
    rows, room = list[Any](), [left]
    made = put_message(rows.append, room, value, key)
    if left <= 0 or row is None:
        assert (made, rows, room) == (None, [], [left])
        return
    assert made == row
    assert rows == [row]
    assert rows[0] is made
    fields = sum(len(field or b"") for field in (row if isinstance(row, tuple) else (row, None)))
    assert room == [left - fields - (16 if isinstance(row, tuple) else 8)]


def test_a_message_that_cannot_be_put_is_an_error() -> None:
    def fail(row: object) -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        put_message(fail, [math.inf], b"v", None)
    put: Any = put_message
    for wrong in ((1, [1.0], b"v", None), (fail, ["a"], b"v", None), (fail, [], b"v", None)):
        with pytest.raises((TypeError, IndexError)):
            put(*wrong)
    with pytest.raises(TypeError, match="a function, a list, a value and a key"):
        put(fail, (1.0,), b"v", None)
