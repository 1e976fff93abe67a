"""Compaction and history: nothing that a snapshot may see changes, the rest goes."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.ids import Timestamp
from txnkv.storage.faults import InjectedFault, arm
from txnkv.tables.maintenance import compaction, flush, history
from txnkv.tables.maintenance.compaction import pick
from txnkv.tables.tablets import manifest, merging, row_set_writer
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.row_set import RowSetRetired
from txnkv.tables.tablets.tablet import Tablet

KEYS = 60


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, by_hand: Callable[..., None]) -> None:
    """Blocks, slices, windows and row sets of a few rows; no rounds in the background."""
    monkeypatch.setattr(row_set_writer, "rows_per_block", lambda widths: 7)
    monkeypatch.setattr(merging, "LOADED_ROWS", 40)
    monkeypatch.setattr(merging, "_LEAST_STEP", 3)
    monkeypatch.setattr(merging, "_WINDOW", 9)
    monkeypatch.setattr(compaction, "ROW_SET_ROWS", 50)
    monkeypatch.setattr(flush, "ROW_SET_ROWS", 50)
    monkeypatch.setattr(compaction, "CRUMB_ROWS", 20)


def tablet_of(client: txnkv.Client) -> Tablet:
    engine = internals.tables(client)
    return engine.tablets(engine.get("t"))[0]


def infos(client: txnkv.Client) -> list[RowSetInfo]:
    return list(tablet_of(client).state(internals.latest(client)).infos)


class Model:
    """A table as a dict, and its states at some timestamps."""

    def __init__(self, client: txnkv.Client, seed: int) -> None:
        self.client = client
        self.table = client.table("t")
        self.rng = random.Random(seed)
        self.rows: dict[int, str] = {}
        self.states: list[tuple[Timestamp, dict[int, str]]] = []
        self.snapshots: list[tuple[txnkv.Snapshot, dict[int, str]]] = []

    def commit(self) -> None:
        """A few changes, at random."""
        changed = dict(self.rows)
        with self.client.transaction() as txn:
            for _ in range(self.rng.randrange(1, 7)):
                key = self.rng.randrange(KEYS)
                if key in changed and self.rng.random() < 0.4:
                    txn.delete("t", key)
                    del changed[key]
                else:
                    changed[key] = f"{len(self.states)}/{self.rng.randrange(1000)}"
                    txn.upsert("t", {"id": key, "v": changed[key]})
        self._committed(txn.commit(), changed)

    def bulk(self, patch: pytest.MonkeyPatch) -> None:
        """Many rows, staged."""
        keys = sorted(self.rng.sample(range(KEYS), 25))
        changed = dict(self.rows)
        with patch.context() as large, self.client.transaction() as txn:
            large.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
            large.setattr("txnkv.tables.write.write_buffer.FEW_ROWS", -1)
            if self.rng.random() < 0.3:
                txn.write("t", pa.table({"id": keys}), op="delete_ignore")
                changed = {key: v for key, v in changed.items() if key not in keys}
            else:
                values = [f"b{len(self.states)}"] * len(keys)
                txn.write("t", pa.table({"id": keys, "v": values}), op="upsert")
                changed |= zip(keys, values, strict=True)
        self._committed(txn.commit(), changed)

    def _committed(self, stamp: Timestamp, rows: dict[int, str]) -> None:
        if rows != self.rows:  # else it wrote nothing and has no timestamp of its own
            self.rows = rows
            self.states.append((stamp, rows))

    def hold(self) -> None:
        self.snapshots.append((self.client.snapshot(), self.rows))

    def release(self) -> None:
        if self.snapshots:
            self.snapshots.pop(self.rng.randrange(len(self.snapshots)))[0].close()

    def check(self) -> None:
        """The latest state and those of open snapshots, by every way of asking."""
        self._check(None, self.rows)
        assert self.table.count() == len(self.rows)
        for snapshot, rows in self.snapshots:
            self._check(snapshot, rows)

    def check_history(self) -> None:
        """Every state that was; only with a history that is long enough."""
        for stamp, rows in self.states[:: max(len(self.states) // 10, 1)]:
            self._check(stamp, rows)

    def _check(self, snapshot: Any, rows: dict[int, str]) -> None:
        found = list(self.table.scan(snapshot=snapshot, ordered=True))
        assert [(row["id"], row["v"]) for row in found] == sorted(rows.items())
        for key in self.rng.sample(range(KEYS), 5):
            row = self.table.get(key, snapshot=snapshot)
            assert (row and row["v"]) == rows.get(key), key
        keys = self.rng.sample(range(KEYS), 20)
        many = self.table.get_many(keys, snapshot=snapshot)
        assert many.column("v").to_pylist() == [rows.get(key) for key in keys]


def made(connect: Callable[..., txnkv.Client], seconds: float, seed: int = 0) -> Model:
    client = connect(history=seconds)
    client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"]))
    return Model(client, seed)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("seconds", [0.0, 900.0, math.inf])
def test_like_a_dict_of_versions(
    connect: Callable[..., txnkv.Client],
    seconds: float,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(connect, seconds, seed)
    client, engine = model.client, internals.tables(model.client)
    acts: list[tuple[float, Callable[[], Any]]] = [
        (10, model.commit),
        (2, lambda: model.bulk(monkeypatch)),
        (3, engine.flush),
        (1, client.compact),
        (1, lambda: engine.compactor.wake()),
        (1, model.hold),
        (1, model.release),
        (1, lambda: history.collect(engine)),
    ]
    for step in range(120):
        model.rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
        if step % 8 == 0:
            model.check()
    if seconds:
        model.check_history()
    while model.snapshots:
        model.release()
    client.compact()
    model.check()
    assert client.check().problems == []
    if seconds == 0.0:
        assert sum(info.rows for info in infos(client)) == len(model.rows)
        assert all(info.uniform and not info.deleted for info in infos(client))
    client.close()
    model.client = connect(history=seconds)
    model.table = model.client.table("t")
    model.check()


def test_what_is_deleted_while_a_compaction_runs_is_deleted_in_its_result(
    connect: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush, a bulk commit and more come between the reading of the sources and the swap."""
    model = made(connect, 0.0, 1)
    engine = internals.tables(model.client)
    for _ in range(3):
        for _ in range(10):
            model.commit()
        engine.flush()

    def meanwhile() -> None:
        arm("compact.written", lambda: None)
        for _ in range(5):
            model.commit()
        other = threading.Thread(target=engine.flush)  # this thread has the compaction lock
        other.start()
        other.join()
        model.bulk(monkeypatch)
        model.commit()

    arm("compact.written", meanwhile)
    model.client.compact()
    model.check()
    engine.flush()
    model.check()
    model.client.compact()
    model.check()
    assert model.client.check().problems == []


def test_deletes_that_come_at_the_swap_make_it_look_again(
    connect: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bulk commit puts deletes beside a source after the compaction has caught up.

    compaction   catch up ...                          swap? the source changed: catch up, swap
    bulk commit              deletes, noted, finalized
    """
    model = made(connect, 0.0, 2)
    engine = internals.tables(model.client)
    for _ in range(3):
        for _ in range(10):
            model.commit()
        engine.flush()
    passes: list[int] = []

    def meanwhile() -> None:
        passes.append(len(passes))
        if len(passes) <= 2:
            model.bulk(monkeypatch)

    arm("compact.caught_up", meanwhile)
    model.client.compact()
    assert len(passes) == 3
    model.check()
    model.client.compact()
    model.check()


@pytest.mark.parametrize(
    "point", ["compact.claimed", "compact.blocks", "compact.written", "compact.caught_up"]
)
def test_a_compaction_that_failed_leaves_nothing(
    connect: Callable[..., txnkv.Client], point: str
) -> None:
    model = made(connect, 900.0, 3)
    for _ in range(3):
        model.commit()
        internals.flush(model.client)
    before = infos(model.client)
    arm(point, "error")
    with pytest.raises(InjectedFault):
        model.client.compact()
    arm(point, lambda: None)
    assert infos(model.client) == before
    with internals.status(model.client).read() as cur:
        assert manifest.unfinished(cur, compaction.WHO) == {}
    assert model.client.check().problems == []
    model.client.compact()
    assert len(infos(model.client)) == 1
    model.check()


def test_old_stamps_become_one_when_no_snapshot_tells_them_apart(
    connect: Callable[..., txnkv.Client],
) -> None:
    model = made(connect, 0.0)
    for _ in range(4):
        model.commit()
        internals.flush(model.client)
    model.hold()
    model.commit()
    model.client.compact()
    assert not infos(model.client)[0].uniform
    model.release()
    model.client.compact()
    assert infos(model.client)[0].uniform
    model.check()


def test_a_flush_still_knows_newer_from_older(connect: Callable[..., txnkv.Client]) -> None:
    """A row inserted at 10 lies on disk; its delete at 20 is in memory; others are committed at
    30. With one stamp of 30 for all, the row would look newer than its delete.
    """
    model = made(connect, 0.0)
    client, engine = model.client, internals.tables(model.client)
    for value in ("1", "2"):
        with client.transaction() as txn:
            txn.upsert("t", {"id": 1, "v": value})
            txn.upsert("t", {"id": int(value) + 1, "v": value})
        engine.flush()
    with client.transaction() as txn:
        txn.delete("t", 1)
    with engine.store.compaction():
        floor = history.compaction_floor(engine).store
        assert floor < txn.commit()
        tablet = tablet_of(client)
        found = tablet.state(engine.coordinator.latest()).settled
        compaction.compact(engine, tablet, found, floor, lambda: None)
    engine.flush()
    assert [row["id"] for row in client.table("t").scan(ordered=True)] == [2, 3]
    assert client.check().problems == []


# -- collection ------------------------------------------------------------------------


def test_replaced_row_sets_stay_while_somebody_reads_them(
    connect: Callable[..., txnkv.Client],
) -> None:
    model = made(connect, 900.0)
    client, engine = model.client, internals.tables(model.client)
    for _ in range(3):
        model.commit()
        engine.flush()
    before = infos(client)
    version = engine.log.version
    pin = engine.store.runtime.hold_manifest(version)
    client.compact()
    assert client.stats()["retired_row_sets"] == 3
    row_set = tablet_of(client).row_set(before[0])
    with tablet_of(client).read() as pages:
        assert row_set.block(pages, 1, 0, again=True)
    pin.end()
    assert history.collect(engine) == 3
    assert client.stats()["retired_row_sets"] == 0
    with tablet_of(client).read() as pages, pytest.raises(RowSetRetired):
        row_set.block(pages, 1, 0, again=True)
    assert client.metrics()["collected_row_sets"] == 3
    model.check()


def test_a_scan_goes_on_over_a_compaction(connect: Callable[..., txnkv.Client]) -> None:
    model = made(connect, 900.0)
    for _ in range(8):
        model.commit()
        internals.flush(model.client)
    scan = iter(model.table.scan(ordered=True).to_batches())
    first = next(scan)
    state = dict(model.rows)
    model.commit()
    model.client.compact()
    rows = first.to_pylist() + [row for batch in scan for row in batch.to_pylist()]
    assert [(row["id"], row["v"]) for row in rows] == sorted(state.items())


# -- the floor -------------------------------------------------------------------------


def test_the_floor_follows_the_history(connect: Callable[..., txnkv.Client], now: Any) -> None:
    model = made(connect, 60.0)
    client, engine = model.client, internals.tables(model.client)
    model.commit()
    first = model.states[0][0]
    assert history.floor(engine).store < first
    now.forward(61)
    assert history.floor(engine).store == first, "not above the latest commit"
    model.commit()
    now.forward(61)
    client.compact()
    assert history.floor(engine).store == model.states[1][0]
    with pytest.raises(txnkv.HistoryExpiredError):
        list(model.table.scan(snapshot=first))
    with pytest.raises(txnkv.HistoryExpiredError):
        client.snapshot(at=first)
    with pytest.raises(txnkv.HistoryExpiredError):
        model.table.get(1, snapshot=first)
    model.check()


def test_a_snapshot_of_an_empty_store_lives_as_long_as_others(
    client: txnkv.Client, table: txnkv.Table, now: Any
) -> None:
    """It had timestamp 0, which the first flush found to be older than any history."""
    with client.snapshot() as snapshot:
        empty = snapshot.timestamp
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    internals.flush(client)
    assert history.floor(internals.tables(client)).store > 0
    assert table.count(snapshot=empty) == 0
    now.forward(901)
    with client.transaction() as txn:
        txn.insert(table, (2, None))
    internals.flush(client)
    history.floor(internals.tables(client))
    with pytest.raises(txnkv.HistoryExpiredError):
        table.count(snapshot=empty)


def test_open_snapshots_and_transactions_hold_the_floor(
    connect: Callable[..., txnkv.Client],
) -> None:
    model = made(connect, 0.0)
    client, engine = model.client, internals.tables(model.client)
    model.commit()
    with client.snapshot() as snapshot:
        model.commit()
        assert history.floor(engine).store == snapshot.timestamp
        txn = client.new_transaction()
        seen = {row["id"]: row["v"] for row in txn.scan("t")}
        model.commit()
    assert history.floor(engine).store == model.states[1][0]
    client.compact()
    assert {row["id"]: row["v"] for row in txn.scan("t")} == seen
    txn.serialize()  # stored now: held by its row
    assert history.floor(engine).store == model.states[1][0]
    txn.rollback()
    assert history.floor(engine).store == model.states[2][0]


def test_a_pin_below_the_floor_is_refused_and_taken_back(
    connect: Callable[..., txnkv.Client],
) -> None:
    model = made(connect, 0.0)
    client, engine = model.client, internals.tables(model.client)
    model.commit()
    model.commit()
    history.floor(engine)
    with pytest.raises(txnkv.HistoryExpiredError):
        history.hold_at(engine.coordinator, model.states[0][0])
    assert engine.store.runtime.least_pin() is None
    assert client.metrics()["history_expired"] == 1
    latest, pin = history.hold_latest(engine.coordinator)
    assert engine.store.runtime.least_pin() == latest == model.states[1][0]
    pin.end()
    assert engine.store.runtime.least_pin() is None


@pytest.mark.parametrize("turn", [False, True])
def test_a_snapshot_that_is_opened_while_the_floor_rises_is_refused_or_stays(
    connect: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch, turn: bool
) -> None:
    """Its pin comes after the raiser has looked at the pins: before its turn to write, or in it."""
    model = made(connect, 0.0)
    model.commit()
    model.commit()
    when, rows = model.states[0]
    most, require, found_it = history._most, history._require, threading.Event()
    opened: list[Future[txnkv.Snapshot]] = []
    looks = count(1)

    def late(*args: Any) -> Timestamp:
        found = most(*args)
        if next(looks) == 1 + turn:
            opened.append(pool.submit(model.client.snapshot, when))
            assert found_it.wait(60)
            if not turn:
                wait(opened)
        return found

    def look(*args: Any) -> None:
        require(*args)
        found_it.set()

    monkeypatch.setattr(history, "_most", late)
    monkeypatch.setattr(history, "_require", look)
    with ThreadPoolExecutor(1) as pool:
        model.client.compact()
        if turn:
            with pytest.raises(txnkv.HistoryExpiredError):
                opened[0].result(60)
        else:
            with opened[0].result(60) as snapshot:
                assert {row["id"]: row["v"] for row in snapshot.scan("t")} == rows


# -- what is worth it ------------------------------------------------------------------


def info(low: int, high: int, rows: int, **more: Any) -> RowSetInfo:
    found = RowSetInfo(low * 1000 + high, 1, Timestamp(9), rows, rows, bytes([low]), bytes([high]))
    return replace(found, min_stamp=Timestamp(9), **more)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "CRUMB_ROWS", 1 << 18)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], None),
        ([info(0, 9, 10)] * 3, None),  # not deep enough
        ([info(0, 9, 1000)] * 4, "overlap"),
        ([info(i, i, 1_000_000) for i in range(9)], None),  # side by side
        ([info(0, 9, 10)] * 3 + [info(0, 9, 1_000_000)], None),  # the large one is not worth it
        ([info(i, i, 1000) for i in range(9)], "crumbs"),
        ([info(i, i, 1000) for i in range(7)], None),
        ([info(0, 9, 100, deleted=30, max_delete=5)], "deleted"),
        ([info(0, 9, 100, deleted=20, max_delete=5)], None),
    ],
)
def test_what_is_picked(plain: None, found: list[RowSetInfo], expected: str | None) -> None:
    chosen = pick(found, lambda info: info.deleted)
    assert (chosen and chosen.reason) == expected


def test_dead_rows_that_a_snapshot_needs_are_not_worth_it(plain: None) -> None:
    assert pick([info(0, 9, 100, deleted=90, max_delete=5)], lambda info: 3) is None


def test_a_base_is_not_written_for_every_few_small_ones(plain: None) -> None:
    base = info(0, 99, 1_000_000)
    small = [replace(info(0, 99, 1000), id=i) for i in range(4)]
    chosen = pick([base, *small], lambda _: 0)
    assert chosen is not None
    assert base not in chosen.infos


def test_a_wide_row_set_reaches_over_those_behind_a_narrow_one() -> None:
    big = 1 << 20
    wide, narrow, other = info(0, 99, big), info(10, 20, big), info(30, 40, big)
    found = compaction.clusters([wide, narrow, other], Timestamp(9), lambda _: 0)
    assert found == [(wide, narrow, other)]


def test_background_merges_come_to_an_end(connect: Callable[..., txnkv.Client]) -> None:
    model = made(connect, 0.0)
    engine = internals.tables(model.client)
    for _ in range(30):
        model.commit()
        engine.flush()
    engine.compactor.wake()
    thread = engine.compactor._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert len(infos(model.client)) < 12
    model.check()
