"""Row sets with stamps and deletes, made by hand, against a plain list of versions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv import core
from txnkv.coordinator.ids import Timestamp
from txnkv.tables.read import point
from txnkv.tables.tablets import Pages, row_set_writer
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.row_set import RowSet, RowSetRetired
from txnkv.tables.tablets.row_set_writer import (
    RowPart,
    RowSetBuilder,
    SortedRows,
    encode_row_set,
    put_deletes,
    stored_counts,
)
from txnkv.tables.tablets.tablet import Tablet

NEVER = core.STAMP_NEVER
KEYS = range(0, 200, 2)


@dataclass(frozen=True)
class Version:
    """One row: key, value, insert and delete stamp."""

    key: int
    value: str
    insert: int
    delete: int

    def seen(self, snapshot: int) -> bool:
        return self.insert <= snapshot < self.delete


def versions(rng: random.Random, *, several: bool, stamps: bool) -> list[Version]:
    """Keys ascending, the versions of a key newest first, as they stand in a row set."""
    rows = []
    for key in KEYS:
        if rng.random() < 0.3:
            continue
        count = rng.choice([1, 1, 2, 3, 7]) if several else 1
        inserts = sorted(rng.sample(range(10, 90), count), reverse=True) if stamps else [50]
        delete = rng.choice([NEVER, NEVER, inserts[0] + rng.randrange(1, 20)])
        for insert in inserts:
            rows.append(Version(key, f"{key}@{insert}", insert, delete))
            delete = insert
    return rows


def encoded(tablet: Tablet, keys: list[int]) -> core.Keys:
    return tablet.codec.encode([pa.array(keys, pa.int64())])


def u64(values: list[int]) -> pa.UInt64Array:
    return pa.array(values, pa.uint64())


class Made:
    """A row set in LMDB and its rows as a list."""

    def __init__(self, tablet: Tablet, info: RowSetInfo, rows: list[Version]) -> None:
        self.tablet = tablet
        self.rows = rows
        self.row_set = RowSet(tablet, info)

    def delete(self, row: int, stamp: int) -> None:
        """A row dies once: the earliest stamp stays."""
        found = put_deletes(
            self.tablet,
            {self.row_set.id: (pa.array([row], pa.uint32()), u64([stamp]))},
            lambda _: None,
        )
        self.rows[row] = replace(self.rows[row], delete=min(self.rows[row].delete, stamp))
        deleted, highest = found[self.row_set.id]
        info = self.row_set.info
        self.row_set.adopt(
            replace(info, deleted=deleted, max_delete=highest, delta_seq=info.delta_seq + 1)
        )

    def check(self, snapshot: int) -> None:
        """Every way of asking gives what the list gives."""
        self.check_scan(snapshot)
        self.check_keys(snapshot)
        self.check_changes(snapshot)

    def check_scan(self, snapshot: int) -> None:
        seen = []
        with self.tablet.read() as pages:
            header = self.row_set.header(pages)
            assert header.rows == len(self.rows)
            for number, block in enumerate(header.blocks):
                arrays = self.row_set.read(pages, block, number, ["id", "v"], 0, block.rows)
                rows = self.row_set.visible(pages, number, snapshot)
                if rows is not None:
                    arrays = self.row_set.gather(pages, number, ["id", "v"], rows)
                seen += list(zip(*(array.to_pylist() for array in arrays), strict=True))
        assert seen == [(v.key, v.value) for v in self.rows if v.seen(snapshot)]

    def check_keys(self, snapshot: int) -> None:
        asked = list(range(-1, 202))
        probes = encoded(self.tablet, asked)
        there = {v.key: i for i, v in enumerate(self.rows) if v.seen(snapshot)}
        with self.tablet.read() as pages:
            starts = [block.start for block in self.row_set.header(pages).blocks]
            assert self.found(pages, probes, snapshot) == [
                self.rows[there[key]].value if key in there else None for key in asked
            ]
            for some in (asked, asked[::7], asked[50:53]):
                self.check_many(pages, some, there, starts, snapshot)

    def found(self, pages: Pages, probes: core.Keys, snapshot: int) -> list[object]:
        """The value of each key's row, one by one."""
        tablet, row_set = self.tablet, self.row_set
        layer = point.layer(tablet, row_set, row_set.info, pages)
        memory = core.MemRowSet(tablet.codec.width)
        layers = core.Layers(tablet.layout, tablet.fills, memory, 0, [core.LayerStep(layer)])

        def load(step: int, number: int) -> None:
            layer.put(number, point.block(tablet, row_set, pages, number))

        rows = layers.find(None, probes, None, snapshot, load).rows(0, lambda _, row: row)
        return rows.columns([0])[0].to_pylist()

    def check_many(self, pages, some, there, starts, snapshot) -> None:  # type: ignore[no-untyped-def]
        probes = encoded(self.tablet, some)
        expected = [i for i, key in enumerate(some) if key in there]
        assert self.row_set.common(pages, probes, snapshot).to_pylist() == expected
        positions, rows = self.row_set.locate(pages, probes, snapshot)
        assert positions.to_pylist() == expected
        assert rows.to_pylist() == [there[some[i]] for i in expected]
        assert rows.type == positions.type == pa.uint32()
        found = {}
        for number, start, hits in self.row_set.find_many(pages, probes, snapshot):
            assert hits.null_count < len(hits)
            for i, row in enumerate(hits.to_pylist()):
                if row is not None:
                    assert start + i not in found
                    found[start + i] = starts[number] + row
        assert found == {i: there[some[i]] for i in expected}
        own = [random.Random(snapshot + i).randrange(100) for i in range(len(some))]
        positions, rows = self.row_set.locate(pages, probes, u64(own))
        assert list(zip(positions.to_pylist(), rows.to_pylist(), strict=True)) == [
            (i, row)
            for i, key in enumerate(some)
            for row, v in enumerate(self.rows)
            if v.key == key and v.seen(own[i])
        ]

    def check_changes(self, after: int) -> None:
        changed = [
            v.key for v in self.rows if v.insert > after or (v.delete > after and v.delete < NEVER)
        ]
        with self.tablet.read() as pages:
            for asked in (list(range(0, 200, 3)), list(range(0, 200, 40))):
                probes = encoded(self.tablet, asked)
                expected = [i for i, key in enumerate(asked) if key in changed]
                assert self.row_set.touched(pages, probes, after) == (expected or [-1])[0]
            for low, high in [(None, None), (20, 100), (30, 31), (150, None), (None, 3)]:
                bounds = [
                    None if x is None else encoded(self.tablet, [x]).key(0) for x in (low, high)
                ]
                keys = [k for k in changed if (low or 0) <= k < (200 if high is None else high)]
                first = encoded(self.tablet, keys[:1]).key(0) if keys else None
                assert self.row_set.touched_range(pages, bounds[0], bounds[1], after) == first


@pytest.fixture
def tablet(client: txnkv.Client, table: txnkv.Table) -> Tablet:
    return internals.tables(client).tablets(internals.tables(client).get("t"))[0]


@pytest.fixture
def make(
    client: txnkv.Client, tablet: Tablet, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Made]]:
    """Writes rows as a row set, claimed as flush does; blocks of 5 rows."""
    monkeypatch.setattr(row_set_writer, "rows_per_block", lambda widths: 5)
    ids = iter(range(1_000_000, 2_000_000))

    def run(rows: list[Version], *, built: bool = False) -> Made:
        keys = encoded(tablet, [v.key for v in rows])
        values = pa.array([v.value for v in rows])
        inserts, deletes = u64([v.insert for v in rows]), u64([v.delete for v in rows])
        claim = RowSetInfo(next(ids), tablet.id, None, 0, 0, b"", b"")
        if not built:
            batch = pa.record_batch([values], names=["v"])
            whole = encode_row_set(tablet, claim, SortedRows(keys, batch, None), inserts, deletes)
            row_set_writer.put_row_set(whole, lambda _: None)
            return Made(tablet, whole.info, rows)
        builder = RowSetBuilder(tablet, claim, "stage.blocks")
        part = RowPart(keys, {"v": values}, None, inserts, deletes)
        for lo in range(0, len(rows), 7):
            builder.add(part.slice(lo, min(7, len(rows) - lo)))
        return Made(tablet, builder.finish(), rows)

    yield run
    with internals.status(client).write() as cur:  # so that the check knows them
        for id in range(1_000_000, next(ids)):
            cur.execute(
                "INSERT INTO row_sets (id, tablet_id, state, counts, retired) "
                "VALUES (?, ?, 3, 1, 1)",
                (id, tablet.id),
            )


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(("several", "stamps"), [(False, False), (False, True), (True, True)])
def test_reads_like_a_list(
    make: Callable[..., Made], several: bool, stamps: bool, built: bool
) -> None:
    rng = random.Random(several + 2 * stamps + 4 * built)
    for _ in range(3):
        made = make(versions(rng, several=several, stamps=stamps), built=built)
        info = made.row_set.info
        assert (info.min_stamp, info.stamp) == (
            min(v.insert for v in made.rows),
            max(v.insert for v in made.rows),
        )
        assert info.uniform == (not stamps)
        assert info.versioned == several
        assert info.deleted == sum(v.delete < NEVER for v in made.rows)
        for snapshot in (0, 9, 30, 49, 50, 51, 70, 200):
            made.check(snapshot)


def test_rows_die_once_and_readers_hear_of_it(make: Callable[..., Made]) -> None:
    rng = random.Random(7)
    made = make(versions(rng, several=False, stamps=False))
    for _ in range(40):
        made.delete(rng.randrange(len(made.rows)), rng.randrange(51, 90))
        made.check_scan(rng.randrange(45, 95))
    for snapshot in (40, 60, 80, 100):
        made.check(snapshot)
    dead = [v.delete for v in made.rows if v.delete < NEVER]
    counts = stored_counts(made.tablet, [made.row_set.id])
    assert counts == {made.row_set.id: (len(dead), max(dead))}


def test_many_deletes_go_in_several_transactions(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(versions(random.Random(1), several=False, stamps=False))
    monkeypatch.setattr(row_set_writer, "WRITE_BYTES", 100)
    rows = list(range(0, len(made.rows), 2))
    found = put_deletes(
        made.tablet,
        {made.row_set.id: (pa.array(rows, pa.uint32()), u64([60] * len(rows)))},
        lambda _: None,
    )
    dead = {*rows} | {i for i, v in enumerate(made.rows) if v.delete < NEVER}
    assert found[made.row_set.id][0] == len(dead)


def test_a_row_set_that_is_gone_is_told_of(tablet: Tablet, make: Callable[..., Made]) -> None:
    """Left out in silence, the deletes of a commit would be lost: the row set that a compaction
    made of this one lacks them.
    """
    made = make(versions(random.Random(2), several=False, stamps=False))
    entry = (pa.array([0], pa.uint32()), u64([60]))
    id = made.row_set.id
    with pytest.raises(RowSetRetired):
        put_deletes(tablet, {id: entry, id + 5000: entry}, lambda _: None)
    with tablet.read() as pages, pages.txn.cursor(db=pages.blocks) as cursor:
        assert not cursor.set_range((id + 5000).to_bytes(8, "big"))


def test_a_refused_writer_deletes_nothing(tablet: Tablet, make: Callable[..., Made]) -> None:
    made = make([Version(1, "a", 50, NEVER)])

    def refuse(_: object) -> None:
        raise RuntimeError("fenced off")

    with pytest.raises(RuntimeError):
        put_deletes(tablet, {made.row_set.id: (pa.array([0], pa.uint32()), u64([60]))}, refuse)
    assert stored_counts(tablet, [made.row_set.id]) == {made.row_set.id: (0, 0)}


def test_an_older_read_does_not_spoil_what_is_remembered(make: Callable[..., Made]) -> None:
    """A read that began before rows were deleted looks at them after another thread was told of
    the deletes: its old delta must not be kept for others.
    """
    made = make([Version(i, "", 50, NEVER if i else 70) for i in range(3)])
    with made.tablet.read() as old, ThreadPoolExecutor(1) as other:
        other.submit(made.delete, 1, 60).result()
        assert made.row_set.visible(old, 0, 100) is not None
    made.check(100)
    made.check(65)


def test_what_an_own_write_staged_is_all_visible(tablet: Tablet, make: Callable[..., Made]) -> None:
    made = make([Version(1, "a", 50, NEVER), Version(2, "b", 50, NEVER)])
    staged = RowSet(tablet, replace(made.row_set.info, stamp=None, min_stamp=None))
    with tablet.read() as pages:
        assert staged.visible(pages, 0, 0) is None
        assert Made(tablet, staged.info, []).found(pages, encoded(tablet, [2]), 0) == ["b"]
        assert staged.common(pages, encoded(tablet, [1, 2, 3]), 0).to_pylist() == [0, 1]


def test_stamps_are_timestamps(make: Callable[..., Made]) -> None:
    info = make(versions(random.Random(3), several=True, stamps=True)).row_set.info
    assert isinstance(info.stamp, Timestamp)
    assert isinstance(info.min_stamp, Timestamp)
