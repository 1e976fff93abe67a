"""Transaction ids and hybrid timestamps.

A timestamp is 63 bits: 51 of microseconds since 2020-01-01 UTC, then 12 of logical time
(Kulkarni et al., "Logical Physical Clocks", 2014, as used by Kudu). The top bit of a stamp
is free to say "undecided, this is a transaction id".

    bit 63        62 ............ 12  11 ...... 0
       0          microseconds        logical

A transaction id is 128 bits: the top 16 name the store's coordinator (TCID), the rest
counts up from 1; inside a store 63 bits of it are used.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(2020, 1, 1, tzinfo=UTC)
LOGICAL_BITS = 12
MAX_TIMESTAMP = (1 << 63) - 1
_MICROSECOND = timedelta(microseconds=1)
_LOCAL_BITS = 112


class Timestamp(int):
    """A hybrid time: microseconds since 2020-01-01 UTC shifted by 12 bits, plus logical time."""

    __slots__ = ()

    def __new__(cls, value: int | str) -> Timestamp:
        number = int(value)
        if not 0 <= number <= MAX_TIMESTAMP:
            raise ValueError(f"a timestamp has 63 bits, {number} does not fit")
        return super().__new__(cls, number)

    @classmethod
    def from_micros(cls, micros: int, logical: int = 0) -> Timestamp:
        """The timestamp of `micros` microseconds since 2020-01-01 UTC."""
        return cls((micros << LOGICAL_BITS) | logical)

    @classmethod
    def from_datetime(cls, when: datetime) -> Timestamp:
        """The last timestamp within the microsecond `when`.

        Raises:
            ValueError: `when` is naive, before 2020 or beyond 2091.
        """
        if when.tzinfo is None:
            raise ValueError(
                f"{when!r} has no time zone: a snapshot is named by an aware datetime, "
                "as datetime.now(timezone.utc)"
            )
        micros = (when - EPOCH) // _MICROSECOND
        if micros < 0:
            raise ValueError(f"{when.isoformat()} is before 2020-01-01 UTC, where time begins here")
        if micros > MAX_TIMESTAMP >> LOGICAL_BITS:
            raise ValueError(f"{when.isoformat()} is in the future, beyond where time ends here")
        return cls.from_micros(micros, (1 << LOGICAL_BITS) - 1)

    @property
    def micros(self) -> int:
        """Microseconds since 2020-01-01 UTC."""
        return self >> LOGICAL_BITS

    @property
    def datetime(self) -> datetime:
        """The physical part as an aware datetime in UTC."""
        return EPOCH + timedelta(microseconds=self.micros)

    def __repr__(self) -> str:
        return f"Timestamp({int(self)})"

    def __str__(self) -> str:
        return int.__repr__(self)


class TxnId(int):
    """A transaction id of 128 bits."""

    __slots__ = ()

    @classmethod
    def of(cls, tcid: int, local: int) -> TxnId:
        return cls((tcid << _LOCAL_BITS) | local)

    @property
    def tcid(self) -> int:
        """The 16-bit coordinator id of the store that gave this id."""
        return self >> _LOCAL_BITS

    @property
    def local(self) -> int:
        """The id inside its store, as it stands in stamps."""
        return self & ((1 << _LOCAL_BITS) - 1)

    def __repr__(self) -> str:
        return f"TxnId({self.tcid}:{self.local})"
