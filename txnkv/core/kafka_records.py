"""Kafka's record batches: records of a client into columns, and a log's batches into Kafka's.

What lies around the records of a batch that comes, and their compression, is the caller's.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from txnkv.core.log_messages import MESSAGES
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable

_SIZES = ffi.typeof("kafka_sizes_t *")
_COLUMNS = ffi.typeof("kafka_columns_t *")
_SOURCE = ffi.typeof("kafka_source_t *")
_U32 = ffi.typeof("uint32_t *")
_U64 = ffi.typeof("uint64_t *")
_I64 = ffi.typeof("int64_t *")
_TIME = MESSAGES.field("timestamp").type


def decode_records(records: Any, count: int, base_millis: int) -> pa.RecordBatch:
    """The records of a batch, without compression, as `encode_batch` takes messages.

    Args:
        records: of the batch, to its end.
        count: how many it says there are.
        base_millis: its base timestamp, milliseconds since 1970.

    Returns:
        Columns value, key, headers, timestamp. Nothing points into `records`. A header without a
        value has one of no bytes.

    Raises:
        CoreError: they make no sense, or pass a limit.
    """
    if not 0 < count <= 0x7FFFFFFF:
        raise CoreError(f"a batch of {count} records")
    memory = readable(records)
    if count > len(memory):  # each has some bytes: nothing is allocated for what is not there
        raise CoreError(f"a batch of {count} records in {len(memory)} bytes")
    sizes = ffi.new(_SIZES)
    asked = (memory, len(memory), count, base_millis)
    check(lib.kafka_records_size(*asked, sizes), f"decoding {count} records")
    times = allocate(8 * count)
    columns = [
        (allocate((count + 7) // 8), allocate(4 * (count + 1)), allocate(size))
        for size in (sizes.value_bytes, sizes.key_bytes, sizes.header_bytes)
    ]
    parts = [each for bits, ends, data in columns
             for each in (pointer(bits), pointer(ends, _U32), pointer(data))]  # fmt: skip
    lib.kafka_records_decode(*asked, ffi.new(_COLUMNS, [pointer(times, _I64), *parts]))
    nulls = (sizes.null_values, sizes.null_keys, sizes.null_headers)
    arrays = {
        name: pa.Array.from_buffers(pa.binary(), count, list(buffers), null_count)
        for name, buffers, null_count in zip(
            ("value", "key", "headers"), columns, nulls, strict=True
        )
        if name == "value" or null_count < count
    }
    arrays["timestamp"] = pa.Array.from_buffers(_TIME, count, [None, times], 0)
    return pa.RecordBatch.from_pydict(arrays)


def encode_records(log: Any, rows: pa.RecordBatch | None, upto: int) -> bytes:
    """Batches of a log as Kafka's, uncompressed.

    Args:
        log: batches one behind the other, in offset order, as a fetch gives them.
        rows: the messages in them, columns as `MESSAGES`; None: there are none.
        upto: batches from this offset on are left out.

    Raises:
        CoreError: the log makes no sense, rows are not in it, or it is more than 2 GiB.
    """
    memory = readable(log)
    held: list[Any] = [memory]
    columns: list[Any] = [ffi.NULL] * 11
    count = 0 if rows is None else rows.num_rows
    if rows is not None and count:
        offset, timestamp = (_whole(rows.column(name)).buffers()[1] for name in MESSAGES.names[:2])
        held += [offset, timestamp]
        columns[:2] = [pointer(offset, _U64), pointer(timestamp, _I64)]
        for at, name in ((2, "value"), (5, "key"), (8, "headers")):
            column = _whole(rows.column(name))
            if column.null_count < count:
                bits, ends, data = column.buffers()
                held += [bits, ends, data]
                columns[at : at + 3] = [pointer(bits), pointer(ends, _U32), pointer(data)]
    source = ffi.new(_SOURCE, [memory, len(memory), upto, count, *columns])
    size = ffi.new(_U64)
    check(lib.kafka_batches_size(source, size), "encoding batches of a log for Kafka's clients")
    out = bytes(size[0])
    # Nobody else has the new object yet, so it may still be written.
    lib.kafka_batches_encode(source, ffi.cast("uint8_t *", ffi.from_buffer(out)), size[0])
    del held
    return out


def _whole(column: pa.Array) -> pa.Array:
    """A column whose buffers begin at its first row."""
    return pa.concat_arrays([column, column.slice(0, 0)]) if column.offset else column
