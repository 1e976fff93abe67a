"""The entry of the aborted index: Kafka's layout, byte by byte.

The index inside of a log is tested with logs: Kafka's TransactionIndexTest is of a file, which
there is none of here.
"""

from __future__ import annotations

import pytest

from txnkv.errors import CorruptionError
from txnkv.topics.log.partition_state import ENTRY_BYTES, AbortedEntry, unpack_entries


def test_entry_has_34_bytes_in_the_order_of_kafkas() -> None:
    entry = AbortedEntry(983493, 137, 299, 200)
    data = entry.pack()
    assert len(data) == ENTRY_BYTES == 34
    assert data[:2] == b"\0\0"
    fields = [int.from_bytes(data[at : at + 8], "big") for at in (2, 10, 18, 26)]
    assert fields == [983493, 137, 299, 200]
    assert AbortedEntry.unpack(data) == entry
    assert unpack_entries(data * 3) == [entry] * 3


def test_a_newer_version_and_a_cut_entry_are_refused() -> None:
    data = AbortedEntry(1, 2, 3, 4).pack()
    with pytest.raises(CorruptionError, match="version 1"):
        unpack_entries(b"\0\1" + data[2:])
    with pytest.raises(CorruptionError, match="cut off"):
        unpack_entries(data + data[:5])
