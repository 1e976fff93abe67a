"""Single values of key columns, to bytes that memcmp orders and back; the core does many at once.

A value goes through the codec of its column's type. Whatever is stored as an integer (dates, times,
decimals) has two functions more, `number` and `value`, which rows use too.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation, Rounded
from operator import index
from typing import Any, Final, Protocol
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa

from txnkv.core.native import lib
from txnkv.errors import SchemaError

_UNIX = datetime(1970, 1, 1)
_UNIX_UTC = _UNIX.replace(tzinfo=UTC)
_UNIX_DAY = _UNIX.date().toordinal()
_MICROSECOND = timedelta(microseconds=1)
_DAY = 86_400_000_000
_TICKS = {"s": 1_000_000, "ms": 1_000, "us": 1}
_WIDE = Context(prec=80, traps=[Inexact, InvalidOperation, Rounded])
_OFFSET = re.compile(r"([+-])([01]\d|2[0-3]):([0-5]\d)")


_BY_ID: dict[int, int] = {
    pa.bool_().id: lib.KEY_BOOL,
    pa.int8().id: lib.KEY_I8,
    pa.int16().id: lib.KEY_I16,
    pa.int32().id: lib.KEY_I32,
    pa.int64().id: lib.KEY_I64,
    pa.uint8().id: lib.KEY_U8,
    pa.uint16().id: lib.KEY_U16,
    pa.uint32().id: lib.KEY_U32,
    pa.uint64().id: lib.KEY_U64,
    pa.float32().id: lib.KEY_F32,
    pa.float64().id: lib.KEY_F64,
    pa.date32().id: lib.KEY_I32,
    pa.timestamp("us").id: lib.KEY_I64,
    pa.time32("s").id: lib.KEY_I32,
    pa.time64("us").id: lib.KEY_I64,
    pa.duration("us").id: lib.KEY_I64,
    pa.decimal128(38).id: lib.KEY_DECIMAL128,
    pa.string().id: lib.KEY_BYTES,
    pa.binary().id: lib.KEY_BYTES,
}
_UUID = pa.uuid()


def key_type(type_: pa.DataType) -> int | None:
    """The core's `key_type_t` of an Arrow type, None when it cannot stand in a key."""
    if type_ == _UUID:
        return int(lib.KEY_UUID)
    return _BY_ID.get(type_.id)


class KeyColumnCodec(Protocol):
    """One column of a key."""

    def encode(self, value: Any) -> bytes:
        """The bytes of a value."""
        ...

    def decode(self, key: bytes, at: int) -> tuple[Any, int]:
        """The value at byte `at` of a key, and where the next column begins."""
        ...


@dataclass(frozen=True)
class IntegerCodec:
    """Integers, and through subclasses whatever is stored as one."""

    name: str
    width: int
    signed: bool

    def number(self, value: Any) -> int:
        return index(value)

    def value(self, number: int) -> Any:
        return number

    def encode(self, value: Any) -> bytes:
        number = self.number(value) + (1 << (8 * self.width - 1) if self.signed else 0)
        try:
            return number.to_bytes(self.width, "big")
        except OverflowError:
            raise ValueError(f"{value!r} is out of the range of {self.name}") from None

    def decode(self, key: bytes, at: int) -> tuple[Any, int]:
        end = at + self.width
        if end > len(key):
            raise ValueError(f"{self.name} needs bytes [{at}, {end}) of {len(key)}")
        raw = int.from_bytes(key[at:end], "big")
        number = raw - (1 << (8 * self.width - 1) if self.signed else 0)
        try:
            return self.value(number), end
        except OverflowError:
            return number, end  # which a key of dates or times takes too


class BoolCodec(IntegerCodec):
    def number(self, value: Any) -> int:
        if value not in (False, True):
            raise ValueError(f"{value!r} is out of the range of bool")
        return int(value)

    def value(self, number: int) -> bool:
        if number > 1:
            raise ValueError(f"{number} is no bool")
        return number == 1


def _nameless(codec: IntegerCodec, number: int) -> OverflowError:
    return OverflowError(
        f"{codec.name} {number} is outside of the years 1 to 9999, which Python cannot name: "
        "read it as Arrow"
    )


class DateCodec(IntegerCodec):
    def number(self, value: Any) -> int:
        if isinstance(value, datetime):
            raise TypeError(f"{value!r} for a date32; take its .date()")
        if isinstance(value, date):
            return value.toordinal() - _UNIX_DAY
        return index(value)

    def value(self, number: int) -> date:
        try:
            return date.fromordinal(number + _UNIX_DAY)
        except (OverflowError, ValueError):
            raise _nameless(self, number) from None


@dataclass(frozen=True)
class TimestampCodec(IntegerCodec):
    zone: tzinfo | None

    def number(self, value: Any) -> int:
        if not isinstance(value, datetime):
            return index(value)
        if (value.tzinfo is None) != (self.zone is None):
            wanted = "without" if self.zone is None else "with"
            raise ValueError(f"{value!r} for a column of {self.name}; give it {wanted} a time zone")
        return (value - (_UNIX if self.zone is None else _UNIX_UTC)) // _MICROSECOND

    def value(self, number: int) -> datetime:
        try:
            if self.zone is None:
                return _UNIX + timedelta(0, 0, number)
            moment = _UNIX_UTC + timedelta(0, 0, number)
            return moment if self.zone is UTC else moment.astimezone(self.zone)
        except OverflowError:
            raise _nameless(self, number) from None


@dataclass(frozen=True)
class TimeCodec(IntegerCodec):
    """Times of a day.

    Attributes:
        tick: microseconds of the unit that they are stored in.
    """

    tick: int

    def number(self, value: Any) -> int:
        if isinstance(value, time):
            if value.tzinfo is not None:
                raise ValueError(f"{value!r} has a time zone, which {self.name} has not")
            since = timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour)
            number, rest = divmod(since // _MICROSECOND, self.tick)
            if rest:
                raise ValueError(f"{value!r} does not fit {self.name} without loss")
            return number
        number = index(value)
        if not 0 <= number * self.tick < _DAY:
            raise ValueError(f"{value!r} is no time of a day")
        return number

    def value(self, number: int) -> time:
        if not 0 <= number * self.tick < _DAY:
            raise ValueError(f"{number} is no time of a day")
        return (_UNIX + timedelta(0, 0, number * self.tick)).time()


@dataclass(frozen=True)
class DurationCodec(IntegerCodec):
    """Durations in microseconds."""

    def number(self, value: Any) -> int:
        return value // _MICROSECOND if isinstance(value, timedelta) else index(value)

    def value(self, number: int) -> timedelta:
        return timedelta(0, 0, number)


DIGITS: Final = 38
"""The most of a decimal."""


def has_few_digits(value: Decimal) -> bool:
    """Return True for a finite number whose digits Arrow can count: of others it makes zeros, or
    reads what is not its own.
    """
    exponent = value.as_tuple().exponent
    return isinstance(exponent, int) and -DIGITS <= exponent <= DIGITS


@dataclass(frozen=True)
class DecimalCodec(IntegerCodec):
    precision: int
    scale: int

    def number(self, value: Any) -> int:
        if not isinstance(value, Decimal):
            value = Decimal(index(value))
        try:
            scaled = value.scaleb(self.scale, _WIDE) if has_few_digits(value) else None
        except DecimalException:
            scaled = None
        if scaled is None or scaled != scaled.to_integral_value(context=_WIDE):
            raise ValueError(f"{value!r} does not fit {self.name} without loss")
        if scaled.copy_abs() >= 10**self.precision:
            raise ValueError(f"{value!r} is out of the range of {self.name}")
        return int(scaled)

    def value(self, number: int) -> Decimal:
        return Decimal(number).scaleb(-self.scale, _WIDE)


@dataclass(frozen=True)
class FloatCodec:
    width: int

    @property
    def _formats(self) -> tuple[str, str]:
        return (">d", ">Q") if self.width == 8 else (">f", ">I")

    def encode(self, value: Any) -> bytes:
        number = float(value)
        real, bits = self._formats
        sign = 1 << (8 * self.width - 1)
        if number != number:  # every NaN is the one quiet NaN
            word = (0x7FF8 << 48) if self.width == 8 else (0x7FC0 << 16)
        else:
            try:
                word = struct.unpack(bits, struct.pack(real, number))[0]
            except OverflowError:
                raise ValueError(f"{value!r} is out of the range of float32") from None
            word = 0 if word == sign else word  # -0.0 is 0.0
        return struct.pack(bits, word ^ (2 * sign - 1) if word & sign else word | sign)

    def decode(self, key: bytes, at: int) -> tuple[float, int]:
        end = at + self.width
        if end > len(key):
            raise ValueError(f"a float needs bytes [{at}, {end}) of {len(key)}")
        real, bits = self._formats
        sign = 1 << (8 * self.width - 1)
        word = struct.unpack(bits, key[at:end])[0]
        word = word ^ sign if word & sign else word ^ (2 * sign - 1)
        return struct.unpack(real, struct.pack(bits, word))[0], end


@dataclass(frozen=True)
class BytesCodec:
    text: bool
    last: bool

    def encode(self, value: Any) -> bytes:
        if self.text:
            if not isinstance(value, str):
                raise TypeError(f"{value!r} for a column of strings")
            raw = value.encode()
        else:
            if not isinstance(value, bytes | bytearray | memoryview):
                raise TypeError(f"{value!r} for a column of binary")
            raw = bytes(value)
        return raw if self.last else raw.replace(b"\0", b"\0\xff") + b"\0\x01"

    def decode(self, key: bytes, at: int) -> tuple[str | bytes, int]:
        if self.last:
            raw, end = key[at:], len(key)
        else:
            raw, end = _unescape(key, at)
        return (raw.decode() if self.text else raw), end


class UuidCodec:
    """UUIDs, by their bytes."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, UUID):
            raise TypeError(f"{value!r} for a column of UUIDs")
        return value.bytes

    def decode(self, key: bytes, at: int) -> tuple[UUID, int]:
        if at + 16 > len(key):
            raise ValueError(f"a UUID needs bytes [{at}, {at + 16}) of {len(key)}")
        return UUID(bytes=key[at : at + 16]), at + 16


def _unescape(key: bytes, at: int) -> tuple[bytes, int]:
    parts = []
    while True:
        zero = key.index(b"\0", at)
        mark = key[zero + 1]
        parts.append(key[at:zero])
        at = zero + 2
        if mark == 0x01:
            return b"\0".join(parts), at
        if mark != 0xFF:
            raise ValueError(f"unknown escape 00 {mark:02X} at byte {zero}")


def value_codec(type_: pa.DataType, last: bool) -> KeyColumnCodec:
    """The codec of a key column.

    Args:
        type_: the column's.
        last: whether it is the key's last column.

    Raises:
        TypeError: the type cannot stand in a key.
    """
    name, kind = str(type_), pa.types
    if kind.is_boolean(type_):
        return BoolCodec(name, 1, False)
    if kind.is_integer(type_):
        return IntegerCodec(name, type_.bit_width // 8, kind.is_signed_integer(type_))
    if kind.is_date32(type_):
        return DateCodec(name, 4, True)
    if kind.is_timestamp(type_) and type_.unit == "us":
        return TimestampCodec(name, 8, True, zone(type_.tz))
    if kind.is_time(type_) and type_.unit in _TICKS:
        return TimeCodec(name, type_.bit_width // 8, True, _TICKS[type_.unit])
    if kind.is_duration(type_) and type_.unit == "us":
        return DurationCodec(name, 8, True)
    if type_ == pa.uuid():
        return UuidCodec()
    if kind.is_decimal128(type_):
        return DecimalCodec(name, 16, True, type_.precision, type_.scale)
    if kind.is_float32(type_) or kind.is_float64(type_):
        return FloatCodec(type_.bit_width // 8)
    if kind.is_string(type_) or kind.is_binary(type_):
        return BytesCodec(kind.is_string(type_), last)
    raise TypeError(f"{type_} cannot stand in a key")


def zone(name: str | None) -> tzinfo | None:
    """The time zone of a column, by a name of the IANA's or as Arrow writes offsets, "+05:30".

    Raises:
        SchemaError: there is none of this name.
    """
    if name is None:
        return None
    if name == "UTC":
        return UTC
    if found := _OFFSET.fullmatch(name):
        sign = -1 if found[1] == "-" else 1
        return timezone(sign * timedelta(hours=int(found[2]), minutes=int(found[3])))
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        raise SchemaError(
            f"there is no time zone {name!r} here: take a name as 'Europe/Berlin', or an offset "
            "as '+05:30'"
        ) from None
