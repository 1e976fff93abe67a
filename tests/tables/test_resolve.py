"""Finalization of what replaces and deletes: delete stamps where the rows lie, put once or twice,
by one process or several, while row sets are flushed and compacted.

At every step a reader sees the commit whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import txnkv
from tests import internals
from txnkv import core
from txnkv.storage import new_rlock
from txnkv.storage.faults import arm, disarm
from txnkv.tables.maintenance import intents
from txnkv.tables.read import lookup, sources
from txnkv.tables.tablets import manifest
from txnkv.tables.tablets import tablet as tablet_file
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.row_set import RowSet
from txnkv.tables.tablets.tablet import Tablet

pytestmark = pytest.mark.usefixtures("small_blocks", "by_hand")

Rows = dict[int, str | None]


@pytest.fixture
def tablet(client: txnkv.Client, table: txnkv.Table) -> Tablet:
    (found,) = internals.tables(client).tablets(client.table_info(table))
    return found


def begin(client: txnkv.Client) -> txnkv.Transaction:
    """A large transaction."""
    txn = client.new_transaction()
    txn.serialize()
    return txn


def write(txn: txnkv.Transaction, op: str, ids: Any, v: str = "") -> None:
    data = pa.table({"id": pa.array(ids, pa.int64()), "v": [f"{v}{i}" for i in ids]})
    txn.write("t", data, op)


def seen(table: txnkv.Table, snapshot: Any = None) -> Rows:
    found = table.scan(snapshot=snapshot).to_arrow()
    rows = dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))
    assert table.count(snapshot=snapshot) == found.num_rows == len(rows)
    keys = list(range(0, 120, 7))
    some = table.get_many(keys, snapshot=snapshot)["v"].to_pylist()
    assert some == [rows.get(key) for key in keys]
    return rows


def infos(client: txnkv.Client, tablet: Tablet) -> tuple[RowSetInfo, ...]:
    return tablet.state(internals.latest(client)).infos


def settled(client: txnkv.Client, tablet: Tablet) -> None:
    """Nothing hides others any more, and the counts are those of the blocks."""
    for info in infos(client, tablet):
        assert info.resolved
        assert info.kind == 0
        dead = 0
        with tablet.read() as pages:
            row_set = tablet.row_set(info)
            for number in range(len(row_set.header(pages).blocks)):
                deletes = row_set.deletes(pages, number)
                dead += 0 if deletes is None else len(deletes[0])
        assert info.deleted == dead


@pytest.fixture
def change(client: txnkv.Client, table: txnkv.Table) -> tuple[Callable[[], None], Rows, Rows]:
    """A commit that changes, deletes and adds rows of several row sets, some of them twice; and
    the rows before and after.
    """
    for first in range(3):
        txn = begin(client)
        write(txn, "insert", range(first, 90, 3))
        txn.commit()
    txn = client.new_transaction()
    write(txn, "upsert", range(0, 20, 2), "memory ")
    txn.commit()
    before = {i: str(i) for i in range(90)} | {i: f"memory {i}" for i in range(0, 20, 2)}
    assert seen(table) == before

    def run() -> None:
        txn = begin(client)
        write(txn, "update", range(10, 60), "new ")
        write(txn, "delete", range(30, 80))
        write(txn, "insert", [*range(40, 50), 100, 101], "again ")
        write(txn, "delete", [100])
        write(txn, "upsert", [45, 101, 102], "last ")
        txn.commit()

    after = {i: v for i, v in before.items() if not 10 <= i < 80}
    after |= {i: f"new {i}" for i in range(10, 30)} | {i: f"again {i}" for i in range(40, 50)}
    after |= {i: f"last {i}" for i in (45, 101, 102)}
    return run, before, after


STEPS = ["commit.decided", "resolve.put", "resolve.resolved", "commit.finalized"]


@pytest.mark.parametrize("step", STEPS)
def test_a_reader_sees_all_of_it_at_each_step(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet, change: Any, step: str
) -> None:
    run, before, after = change
    old = client.snapshot()
    looks = []

    def look() -> None:
        looks.append(seen(table) == after)
        assert seen(table, old) == before

    arm(step, look)
    run()
    assert looks
    assert all(looks)
    assert seen(table) == after
    assert seen(table, old) == before
    settled(client, tablet)
    old.close()


@pytest.mark.parametrize("step", STEPS)
def test_left_in_the_middle_and_done_by_another(
    client: txnkv.Client,
    table: txnkv.Table,
    tablet: Tablet,
    change: Any,
    by_hand: Callable[[txnkv.Client], None],
    step: str,
) -> None:
    run, _, after = change
    arm(step, "error")
    with pytest.raises(OSError, match="injected"):
        run()
    disarm()
    assert seen(table) == after
    by_hand(client)
    assert seen(table) == after
    settled(client, tablet)
    assert client.stats()["staged_row_sets"] == 0


@pytest.mark.parametrize("n", [12, 48])
def test_rows_written_many_times_are_looked_for_once_each_time(
    client: txnkv.Client,
    table: txnkv.Table,
    tablet: Tablet,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
) -> None:
    for first in (0, 1):
        txn = begin(client)
        write(txn, "insert", [first, first + 2])
        txn.commit()
    txn = begin(client)
    for k in range(n):
        write(txn, "upsert", [k % 3, 50 + k % 2], f"{k} ")
        if k % 6 == 5:
            write(txn, "delete", [k % 3])
            write(txn, "insert", [k % 3], f"after {k} ")
    put = count(monkeypatch, intents, "put_deletes")
    looked = count(monkeypatch, RowSet, "locate")
    txn.commit()
    last = [f"after {n - 1} 2", f"{n - 1} 51", f"{n - 2} 1", f"{n - 2} 50", f"{n - 3} 0", "3"]
    assert sorted(seen(table).values()) == sorted(last)
    settled(client, tablet)
    assert len(put) == 1
    assert len(looked) <= 6 * n
    live = [info.live_rows for info in infos(client, tablet)]
    assert sum(live) == len(last)


@pytest.mark.parametrize("keys_at_once", [0, 60, 1 << 20])
@given(
    ops=st.lists(
        st.tuples(
            st.sampled_from(["upsert", "update_ignore", "insert_ignore", "delete_ignore"]),
            st.sets(st.integers(0, 119), min_size=1, max_size=30),
        ),
        max_size=12,
    )
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_many_row_sets_that_replace_each_other(
    client: txnkv.Client, tablet: Tablet, keys_at_once: int, ops: list[tuple[str, set[int]]]
) -> None:
    """Looked for one by one, a few together, and all at once."""
    table = client.table("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intents, "_KEYS_AT_ONCE", 8 * keys_at_once)
        patch.setattr(intents, "_MANY", 1)
        patch.setattr(intents, "_NEAR", 1)
        patch.setattr(intents, "_ROWS_AT_ONCE", 40)
        patch.setattr(sources, "_MANY_MASKS", 2)
        rows = seen(table)
        txn = begin(client)
        for number, (op, some) in enumerate(ops):
            write(txn, op, sorted(some), f"{number} ")
            for id in some:
                if op == "delete_ignore":
                    rows.pop(id, None)
                elif op == "upsert" or (op == "update_ignore") == (id in rows):
                    rows[id] = f"{number} {id}"
            own = txn.get_many(table, list(range(120)))["v"].to_pylist()
            assert own == [rows.get(id) for id in range(120)]
        found = txn.scan(table).to_arrow()
        assert dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True)) == rows
        txn.commit()
    assert seen(table) == rows
    settled(client, tablet)


@pytest.mark.parametrize("n", [20, 80])
def test_small_row_sets_that_replace_rows_are_looked_for_together(
    client: txnkv.Client,
    table: txnkv.Table,
    tablet: Tablet,
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    locate = RowSet.locate

    def counted(self: RowSet, *args: Any) -> Any:
        looks.append(self.info.id)
        return locate(self, *args)

    txn = begin(client)
    for number in range(n):
        write(txn, "upsert", [0, *range(1 + number, 1000, n)], f"{number} ")
    monkeypatch.setattr(RowSet, "locate", counted)
    monkeypatch.setattr(intents, "_MANY", 4)
    txn.commit()
    assert len(looks) <= 2 * n * n.bit_length()
    assert table.get(0) == {"id": 0, "v": f"{n - 1} 0"}
    assert table.count() == 1000
    settled(client, tablet)


@pytest.mark.parametrize("n", [10, 40])
def test_a_write_and_a_get_know_of_the_row_sets_alone_that_may_have_its_keys(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    built = count(monkeypatch, manifest, "_info")
    txn = begin(client)
    for k in range(n):
        write(txn, "insert", [2 * k, 2 * k + 1])
    assert not built
    write(txn, "upsert", range(1, 4), "again ")
    assert len(built) == 2
    assert [txn.get("t", key)["v"] for key in (3, 4)] == ["again 3", "4"]
    assert len(built) == 5
    txn.write("t", pa.table({"id": [3, 2 * n], "v": ["kept", "new"]}), "insert_ignore")
    txn.write("t", pa.table({"id": pa.array([], pa.int64()), "v": pa.array([], pa.string())}))
    write(txn, "delete", [0])
    txn.commit()
    after = {i: str(i) for i in range(4, 2 * n)} | {i: f"again {i}" for i in range(1, 4)}
    assert seen(table) == after | {2 * n: "new"}


@pytest.mark.parametrize(("n", "more"), [(10, 0), (40, 0), (40, 20)])
def test_row_sets_of_few_rows_that_lie_apart_are_looked_into_once(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch, n: int, more: int
) -> None:
    """Their key ranges all meet: each write looked into all before it."""
    txn = begin(client)
    for k in range(n):
        write(txn, "insert", [k, 1000 - k, *range(2000 + k, 2000 + more * n, n)])
    built = count(monkeypatch, manifest, "_info")
    write(txn, "upsert", [3, 500, 997], "again ")
    assert len(built) <= 2  # the last one was not looked into before
    assert [txn.get("t", key)["v"] for key in (3, 4, 500)] == ["again 3", "4", "again 500"]
    found = txn.get_many("t", [500, 5, 997, 600])["v"].to_pylist()
    assert found == ["again 500", "5", "again 997", None]
    write(txn, "delete", [3, 995])
    write(txn, "insert", [3], "new ")
    built.clear()
    write(txn, "update", [3, 4], "last ")
    assert len(built) <= 5
    txn.commit()
    after = {i: str(i) for k in range(n) for i in (k, 1000 - k)} | {997: "again 997"}
    after |= {i: str(i) for i in range(2000, 2000 + more * n)}
    after |= {500: "again 500", 3: "last 3", 4: "last 4"}
    del after[995]
    assert seen(table) == after


def test_keys_of_row_sets_that_others_have_ended_are_forgotten(
    client: txnkv.Client, tablet: Tablet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tablet_file, "_NOTED_KEYS", 160)  # a look each 10 keys
    known = tablet._staged_keys = tablet_file._StagedKeys()
    gone = 1 << 40
    known.add(gone, [tablet.codec.encode([pa.array(range(5), pa.int64())])])
    txn = begin(client)
    write(txn, "upsert", range(5))
    write(txn, "upsert", range(3, 8))
    write(txn, "upsert", range(3))
    assert known._rows
    assert gone not in known._rows
    assert txn.scan("t").to_arrow().num_rows == 8
    txn.commit()
    assert client.table("t").count() == 8


@pytest.mark.parametrize("n", [10, 40])
def test_a_write_looks_into_no_more_of_an_index_in_a_large_transaction(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    client.create_index(table, ["v"], unique=True)
    txn = begin(client)
    for k in range(n):
        write(txn, "insert", [k, 1000 - k])
    looked = count(monkeypatch, lookup._Search, "_rows")
    write(txn, "upsert", [3, 500, 997], "4")  # among the values that are there
    assert 1 <= len(looked) <= 8
    with pytest.raises(txnkv.RowErrors, match="unique"):
        txn.write("t", pa.table({"id": [2000], "v": ["5"]}))
    txn.rollback()


def count(monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> list[str]:
    calls, real = [], getattr(of, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return real(*args)

    monkeypatch.setattr(of, name, counted)
    return calls


@pytest.mark.parametrize("step", STEPS[:3])
def test_two_finalize_at_once(
    client: txnkv.Client,
    table: txnkv.Table,
    tablet: Tablet,
    change: Any,
    by_hand: Callable[[txnkv.Client], None],
    step: str,
) -> None:
    """The second begins in the midst of the first, and is done before it."""
    run, _, after = change
    once = [True]

    def second() -> None:
        if once:
            once.clear()
            tablet.turn = new_rlock()  # as in another process
            other = threading.Thread(target=by_hand, args=(client,))
            other.start()
            other.join()
            assert seen(table) == after

    arm(step, second)
    run()
    assert not once
    assert seen(table) == after
    settled(client, tablet)


@pytest.mark.parametrize("step", STEPS[:3])
@pytest.mark.parametrize("what", ["flush", "compact"])
def test_row_sets_that_are_replaced_meanwhile(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet, change: Any, what: str, step: str
) -> None:
    """A flush or compaction comes between the look for the rows and the note of their deletes;
    it finalizes the commit itself where it must.
    """
    run, before, after = change
    old = client.snapshot()
    once = [True]

    def meanwhile() -> None:
        if not once:
            return
        once.clear()
        with client.transaction() as txn:
            txn.upsert(table, (5, "between"))
        if what == "flush":
            internals.flush(client)
        else:
            client.compact()

    arm(step, meanwhile)
    run()
    assert not once
    assert seen(table) == after | {5: "between"}
    assert seen(table, old) == before
    settled(client, tablet)
    client.compact()
    assert seen(table) == after | {5: "between"}
    assert seen(table, old) == before
    old.close()
    client.compact()
    assert seen(table) == after | {5: "between"}


def test_the_next_commit_of_the_same_keys(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet, change: Any
) -> None:
    """The first is left where it hides rows by its keys; who replaces its rows finalizes it."""
    run, _, after = change
    arm("commit.decided", "error")
    with pytest.raises(OSError, match="injected"):
        run()
    disarm()
    txn = begin(client)
    write(txn, "insert", [30, 31], "back ")
    write(txn, "update", [40, 10, 45], "newer ")
    write(txn, "delete", [102])
    txn.commit()
    after = after | {i: f"back {i}" for i in (30, 31)} | {i: f"newer {i}" for i in (40, 10, 45)}
    del after[102]
    assert seen(table) == after
    settled(client, tablet)


def test_a_plain_insert_above_a_delete_in_progress(
    connect: Any,
    client: txnkv.Client,
    table: txnkv.Table,
    tablet: Tablet,
    by_hand: Any,
    change: Any,
) -> None:
    """It replaces nothing and need not wait; the tombstone below must not hide it, and a check
    finds no key that is alive twice.
    """
    run, _, after = change
    arm("commit.decided", "error")
    with pytest.raises(OSError, match="injected"):
        run()
    disarm()
    assert client.check().problems == connect(read_only=True).check().problems == []
    txn = begin(client)
    write(txn, "insert", [30, 31], "back ")
    txn.commit()
    after = after | {i: f"back {i}" for i in (30, 31)}
    assert seen(table) == after
    assert client.check().problems == []
    by_hand(client)
    assert seen(table) == after
    settled(client, tablet)


def test_what_replaces_nothing_hides_nothing(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet
) -> None:
    """Plain inserts, and upserts of new rows, are done when they are decided."""
    put: list[bool] = []
    arm("resolve.put", lambda: put.append(True))
    arm("resolve.resolved", lambda: put.append(True))
    hiding: list[RowSetInfo] = []
    arm("commit.decided", lambda: hiding.extend(i for i in infos(client, tablet) if not i.resolved))
    for number, op in enumerate(("insert", "insert_ignore", "upsert")):
        txn = begin(client)
        write(txn, op, range(number * 50, number * 50 + 50))
        write(txn, "delete_ignore", [1000])
        txn.commit()
    assert put == hiding == []
    settled(client, tablet)


# -- supersede -------------------------------------------------------------------------


def _keys(tablet: Tablet, ids: Any) -> core.Keys:
    return tablet.codec.encode([pa.array(ids, pa.int64())])


def _found(tablet: Tablet, state: Any, ids: Any, stamps: Any) -> dict[int, dict[int, int]]:
    """By row set: the keys that are replaced, and the stamps they get."""
    found = {}
    for id, (rows, put) in intents.supersede(tablet, state, _keys(tablet, ids), stamps).items():
        (info,) = [info for info in state.infos if info.id == id]
        keys: list[int] = []
        with tablet.read() as pages:
            row_set = tablet.row_set(info)
            for number in range(len(row_set.header(pages).blocks)):
                keys += tablet.codec.decode(row_set.keys(pages, number), 0).to_pylist()
        numbers = rows.to_pylist()
        assert numbers == sorted(set(numbers))
        found[id] = {keys[row]: stamp for row, stamp in zip(numbers, put.to_pylist(), strict=True)}
    return found


def test_rows_are_found_by_the_stamps_of_their_keys(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet
) -> None:
    latest = internals.coordinator(client).latest
    stamps = []
    for op, ids in [("insert", range(10)), ("update", range(4, 8)), ("delete", [6, 7])]:
        txn = begin(client)
        write(txn, op, ids)
        stamps.append(int(txn.commit()))
    first, second, third = stamps
    state = tablet.state(latest())
    one, two = sorted(info.id for info in state.infos)
    assert _found(tablet, state, range(20), third + 1) == {
        one: dict.fromkeys((0, 1, 2, 3, 8, 9), third + 1),
        two: dict.fromkeys((4, 5), third + 1),
    }
    # At its own stamp a commit finds again what it replaced: done twice it is the same.
    assert _found(tablet, state, range(4, 8), second) == {one: dict.fromkeys(range(4, 8), second)}
    assert _found(tablet, state, [6, 7], third) == {two: {6: third, 7: third}}
    assert _found(tablet, state, range(20), first) == {}
    mixed = pa.array([second, third, third + 5, first], pa.uint64())
    assert _found(tablet, state, [4, 6, 8, 9], mixed) == {
        one: {4: second, 8: third + 5},
        two: {6: third},
    }
    assert intents.supersede(tablet, state, _keys(tablet, []), third) == {}
    assert _found(tablet, state, [100, 200], third + 1) == {}


def test_settle_goes_by_commit_and_leaves_later_ones(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet
) -> None:
    txn = begin(client)
    write(txn, "insert", range(10))
    txn.commit()
    arm("commit.decided", "error")
    stamps = []
    for ids in (range(2), range(4, 6), range(8, 10)):
        txn = begin(client)
        write(txn, "update", ids, "new ")
        with pytest.raises(OSError, match="injected"):
            txn.commit()
        stamps.append(internals.latest(client))
    disarm()
    intents.settle(internals.tables(client), [tablet.id], stamps[1])
    left = [info.stamp for info in infos(client, tablet) if not info.resolved]
    assert left == [stamps[2]]
    assert seen(table) == {i: f"new {i}" if i not in (2, 3, 6, 7) else str(i) for i in range(10)}


@pytest.mark.parametrize("fails", [False, True])
def test_many_that_commit_at_once_take_turns(client: txnkv.Client, fails: bool) -> None:
    """Each is resolved by whichever thread, few by two: what an earlier one has left to do is
    not waited for. All did the work of all before. One that fails keeps nobody.
    """
    schema = txnkv.Schema({"id": "int64", "v": "int64"}, primary_key=["id"])
    table = client.create_table("halves", schema, txnkv.hash_partition("id", 4))
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(100), "v": [0] * 100}))
    txns = [begin(client) for _ in range(12)]
    for i, txn in enumerate(txns):
        keys = range(8 * i, 8 * i + 1 + i % 8)  # of one tablet, or of several
        txn.write(table, pa.table({"id": keys, "v": [i + 1] * len(keys)}), "upsert")
    decided, resolved = threading.Barrier(len(txns)), list[int]()
    arm("commit.decided", decided.wait)
    arm("resolve.resolved", "error@3" if fails else lambda: resolved.append(1))
    failed: list[OSError] = []

    def commit(txn: txnkv.Transaction) -> None:
        try:
            txn.commit()
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=commit, args=(txn,)) for txn in txns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    disarm()
    assert len(failed) == fails
    assert fails or len(txns) <= len(resolved) < 3 * len(txns)
    wanted = {8 * i + n: i + 1 for i in range(12) for n in range(1 + i % 8)}
    assert {row["id"]: row["v"] for row in table.scan() if row["v"]} == wanted
