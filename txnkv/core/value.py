"""Single values of blocks, for reads of one row: without an Arrow array for each."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from txnkv.core.block import block_layout, decode_block
from txnkv.core.native import check, ffi, lib, readable

_VALUE = ffi.typeof("block_value_t *")
_EPOCH = datetime(1970, 1, 1)
_EPOCH_DAY = _EPOCH.date().toordinal()
_WIDE = Context(prec=80)


class ValueReader:
    """Reads values of one type out of blocks, as Python objects.

    A value is what `decode_block(block, type_)[row].as_py()` gives, several times faster.
    Make one for a column and keep it; it may be shared by threads.
    """

    __slots__ = ("_convert", "_kind", "_type", "_width")

    def __init__(self, type_: pa.DataType) -> None:
        """Makes a reader of blocks that hold `type_`."""
        self._type = type_
        self._kind, self._width = block_layout(type_)
        self._convert = _converter(type_)

    def __call__(self, block: Any, row: int) -> Any:
        """The value at `row` of a verified block; None for a null.

        Raises:
            CoreError: the block is damaged, or not of this type.
            IndexError: the row is not in the block.
        """
        if row < 0:
            raise IndexError(f"row {row} of a block")
        if self._convert is None:
            return decode_block(block, self._type, row, 1)[0].as_py()
        memory = readable(block)
        value = ffi.new(_VALUE)
        status = lib.block_value(memory, len(memory), self._kind, self._width, row, value)
        if status:
            check(status, f"reading row {row} of a block of {self._type}")
        return None if value.is_null else self._convert(value)


def _converter(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """From a `block_value_t *` to Python; None for types that go through Arrow."""
    kind = pa.types
    if kind.is_boolean(type_):
        return lambda value: value.bit == 1
    if kind.is_string(type_):
        return lambda value: str(ffi.buffer(value.data, value.len), "utf-8")
    if kind.is_binary(type_):
        return lambda value: bytes(ffi.buffer(value.data, value.len))
    if kind.is_decimal128(type_):
        return _decimal(type_.scale)
    if kind.is_date32(type_):
        number = _number("int32_t *")
        return lambda value: date.fromordinal(number(value) + _EPOCH_DAY)
    if kind.is_timestamp(type_) and type_.unit == "us":
        return _timestamp(type_.tz)
    if kind.is_integer(type_):
        return _number(f"{type_}_t *")
    if kind.is_float32(type_) or kind.is_float64(type_):
        return _number("float *" if kind.is_float32(type_) else "double *")
    return None


def _number(c_type: str) -> Callable[[Any], Any]:
    pointer = ffi.typeof(c_type)
    return lambda value: ffi.cast(pointer, value.data)[0]


def _decimal(scale: int) -> Callable[[Any], Decimal]:
    def convert(value: Any) -> Decimal:
        unscaled = int.from_bytes(ffi.buffer(value.data, 16), "little", signed=True)
        return Decimal(unscaled).scaleb(-scale, _WIDE)

    return convert


def _timestamp(zone: str | None) -> Callable[[Any], datetime]:
    number = _number("int64_t *")
    if zone is None:
        return lambda value: _EPOCH + timedelta(microseconds=number(value))
    epoch, tz = _EPOCH.replace(tzinfo=UTC), UTC if zone == "UTC" else ZoneInfo(zone)
    return lambda value: (epoch + timedelta(microseconds=number(value))).astimezone(tz)
