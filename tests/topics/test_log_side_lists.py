"""SIDE_LIST markers in a partition's log: what they stand for is read in their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.topics.log_tools import Log, data
from txnkv import core
from txnkv.topics.log.partition_log import CommitEntry

DESIGN = "P1 P1 P2 C1 P2 A2 P1 P2 P1 A1 C2"


def values(records: bytes) -> list[int]:
    """The offsets of all messages of a read."""
    rows = core.decode(records, core.all_data(records, 0, 1 << 62), 0, None)
    return list(rows["offset"].to_pylist())


def side_list(n: int) -> bytes:
    return core.encode_control(
        core.ControlType.SIDE_LIST, txn_id=7, count=n, timestamp=1000,
        body=b"".join(n.to_bytes(8, "little") for n in (0, 0, n, 100)),
    )  # fmt: skip


def stands_for(txn: Any, marker_: bytes, offset: int, max_bytes: int) -> list[bytes]:
    """A decided batch for every two offsets."""
    header = core.read_header(marker_)
    first = (offset - header.base_offset) // 2
    made: list[bytes] = []
    for at in range(header.base_offset + 2 * first, header.next_offset, 2):
        made.append(core.place(data(header.txn_id, 2, decided=True), at))
        if sum(map(len, made)) > max_bytes:
            break
    return made


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Log]:
    with Log(tmp_path / "store", expand=stands_for) as made:
        made.append(data(n=3), data(), side_list(6), data(), together=True)
        yield made


@pytest.mark.parametrize("max_bytes", [1, 200, 300, 1 << 20])
def test_side_batches_are_read_in_place_of_their_marker(side: Log, max_bytes: int) -> None:
    assert values(side.ask("read", 0, 1 << 20)) == list(range(11))
    for offset in range(11):
        at, found = offset, list(range(offset))
        while at < 11:
            records = side.ask("read", at, max_bytes)
            found += [o for o in values(records) if o >= at]
            at = core.walk(records)[-1][1].next_offset
        assert found == list(range(11))
    assert values(side.ask("read", 0, 1 << 20, 6)) == list(range(6))


def test_a_raw_read_gives_the_marker(side: Log) -> None:
    records = side.ask("read", 5, 1 << 20, raw=True)
    kinds = [(header.base_offset, header.is_control) for _, header in core.walk(records)]
    assert kinds == [(4, True), (10, False)]


def test_commits_and_sizes_of_side_lists(side: Log) -> None:
    assert side.ask("commits", 5, 1) == [CommitEntry(4, 6, 7, 4, 0)]
    stored = len(side.ask("read", 0, 1 << 20, raw=True))
    assert side.ask("segments")[0].bytes == stored + 100


def test_a_marker_is_replaced_by_what_it_stands_for(side: Log) -> None:
    batches = [core.place(data(7, n, decided=True), at) for n, at in ((4, 4), (2, 8))]
    side.write("replace", 4, batches)
    assert side.ask("read", 4, 1 << 20, 10) == b"".join(batches)
    assert side.ask("commits", 5, 1) == [CommitEntry(4, 6, 7, 4, 0)]
    for wrong in (batches, []):
        with pytest.raises(ValueError, match="replace"):
            side.write("replace", 4, wrong)
    assert side.write("truncate", 9) == 4  # never in the middle of a transaction
    assert side.end == 4


def test_a_replacement_takes_the_very_same_offsets(side: Log) -> None:
    short = [core.place(data(7, 4, decided=True), 4)]
    with pytest.raises(ValueError, match=r"end at 8"):
        side.write("replace", 4, short)
    with pytest.raises(ValueError, match=r"\[4, 10\)"):
        side.write("replace", 4, [core.place(data(7, 6, decided=True), 5)])
