"""The aborted index: Kafka's TransactionIndexTest, as a file and inside of a log.

Kafka's cases of a channel that is closed or interrupted have no counterpart: the file is
opened for each use. Its flush of a missing file has none either.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from txnkv.errors import CorruptionError
from txnkv.topics.log.aborted_index import (
    ENTRY_BYTES,
    AbortedEntry,
    TransactionIndex,
    collect,
    unpack_entries,
)

A = [
    AbortedEntry(0, 0, 10, 11),
    AbortedEntry(1, 5, 15, 13),
    AbortedEntry(2, 18, 35, 25),
    AbortedEntry(3, 32, 50, 40),
]
B = [AbortedEntry(0, 0, 10, 2), AbortedEntry(1, 5, 15, 16), *A[2:]]


def index_of(path: Path, entries: list[AbortedEntry]) -> TransactionIndex:
    index = TransactionIndex(path / "0.txnindex")
    for entry in entries:
        index.append(entry)
    return index


def ids(found: list[AbortedEntry]) -> list[int]:
    return [entry.txn_id for entry in found]


@pytest.mark.parametrize(
    ("offset", "upto", "expected", "complete"),
    [
        (0, 100, [0, 1, 2, 3], False),
        (0, 32, [0, 1, 2], True),
        (0, 35, [0, 1, 2, 3], True),
        (10, 35, [0, 1, 2, 3], True),
        (11, 35, [1, 2, 3], True),
        (20, 41, [2, 3], False),
    ],
)
def test_collect_aborted_transactions(
    tmp_path: Path, offset: int, upto: int, expected: list[int], complete: bool
) -> None:
    found, all_known = index_of(tmp_path, A).collect(offset, upto)
    assert (ids(found), all_known) == (expected, complete)
    # A log seeks: what ends below the offset is not even looked at, and it changes nothing.
    sought = [entry for entry in A if entry.last_offset >= offset]
    assert collect(sought, offset, upto) == (found, all_known)


@pytest.mark.parametrize(
    ("offset", "left", "last"), [(51, [0, 1, 2, 3], 50), (50, [0, 1, 2], 35), (15, [0], 10)]
)
def test_truncate(tmp_path: Path, offset: int, left: list[int], last: int) -> None:
    index = index_of(tmp_path, B)
    index.truncate(offset)
    assert ids(index.collect(0, 100)[0]) == left
    assert index.last_offset == last


def test_reset(tmp_path: Path) -> None:
    index = index_of(tmp_path, B)
    index.reset()
    assert index.collect(0, 100) == ([], False)
    assert index.last_offset is None
    assert index.is_empty


@pytest.mark.parametrize("last", [15, 10])
def test_last_offset_must_increase(tmp_path: Path, last: int) -> None:
    index = index_of(tmp_path, [AbortedEntry(1, 5, 15, 13)])
    with pytest.raises(ValueError, match="15"):
        index.append(AbortedEntry(0, 0, last, 11))
    assert ids(index.entries()) == [1]


def test_opened_again_it_appends_at_its_end(tmp_path: Path) -> None:
    index_of(tmp_path, A)
    again = index_of(tmp_path, [AbortedEntry(3, 50, 60, 55)])
    assert again.entries() == [*A, AbortedEntry(3, 50, 60, 55)]


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


def test_rename(tmp_path: Path) -> None:
    index = index_of(tmp_path, [AbortedEntry(0, 0, 10, 2)])
    index.rename(tmp_path / "other.txnindex")
    index.append(AbortedEntry(1, 5, 15, 16))
    assert [entry.first_offset for entry in index.collect(0, 100)[0]] == [0, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["other.txnindex"]


def test_the_file_is_made_by_the_first_append(tmp_path: Path) -> None:
    index = TransactionIndex(tmp_path / "0.txnindex")
    index.reset()
    index.truncate(5)
    assert index.is_empty
    assert not index.path.exists()
    index.path.touch()
    assert index.is_empty
    index.append(A[0])
    assert not index.is_empty
    assert index.path.stat().st_size == ENTRY_BYTES


def test_delete(tmp_path: Path) -> None:
    index = index_of(tmp_path, A)
    assert index.delete()
    assert not index.path.exists()
    assert not index.delete()


def test_an_entry_below_its_segment_is_damage(tmp_path: Path) -> None:
    index_of(tmp_path, A).check()
    with pytest.raises(CorruptionError, match="begins at 11"):
        TransactionIndex(tmp_path / "0.txnindex", base_offset=11).check()
