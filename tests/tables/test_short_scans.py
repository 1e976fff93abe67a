"""Scans of short ranges of keys: read in the published layers, as single keys are.

Rows lie in every place where they can: in the transaction's memory, staged, in committed memory, in
row sets one above the other, some of them replaced or deleted. What a scan gives is compared with a
dict; that it went the short way is seen by its plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.tables.read.predicate import Filter
from txnkv.tables.read.sources import ShortPart
from txnkv.transaction.table_scan import Scan

SCHEMA = txnkv.Schema(
    {"w": "int32", "d": "string", "v": "int64", "l": "list<int32>?"}, primary_key=["w", "d"]
)
QUEUE = txnkv.Schema({"q": "int64", "n": "int64"}, primary_key=["q", "n"])
PLACES = [None, txnkv.hash_partition("d", 3), txnkv.range_partition("w", [1, 3])]
Rows = dict[tuple[int, str], int]


def row(key: tuple[int, str], v: int) -> dict[str, Any]:
    return {"w": key[0], "d": key[1], "v": v, "l": [v, -v] if v % 2 else None}


def rows_of(scan: Scan, short: bool = True) -> list[dict[str, Any]]:
    """The rows as dicts; `short`: without a plan."""
    rows = list(scan)
    assert scan._bound is None or not short
    again = [scan.to_arrow().to_pylist(), list(scan)]
    if not scan._asked.ordered:
        again = [sorted(each, key=str) for each in again]
    assert again == [rows if scan._asked.ordered else sorted(rows, key=str)] * 2
    return rows


def is_short(scan: Scan) -> bool:
    return all(isinstance(part, ShortPart) for part in scan._planned().parts)


def same(reader: Any, table: txnkv.Table, rows: Rows, short: bool) -> None:
    """Prefixes, ranges and limits, of the whole table too."""
    keys = sorted(rows)
    alone = short and isinstance(reader, txnkv.Snapshot)
    for w in range(-1, 6):
        wanted = [row(key, rows[key]) for key in keys if key[0] == w]
        assert rows_of(reader.scan(table, where=[("w", "=", w)], ordered=True), alone) == wanted
        scan = reader.scan(table, where=[("w", "=", w)], ordered=True)
        assert scan.to_arrow().to_pylist() == wanted
        assert is_short(scan) or not short
        where = [("w", "=", w), ("d", ">=", "k3"), ("d", "<", "k7")]
        inside = [each for each in wanted if "k3" <= each["d"] < "k7"]
        scan = reader.scan(table, columns=["v", "d"], where=where, ordered=True)
        assert rows_of(scan, alone) == [{"v": each["v"], "d": each["d"]} for each in inside]
        odd = reader.scan(table, where=[*where, ("v", ">", 10)], ordered=True, limit=2)
        assert rows_of(odd, alone) == [each for each in inside if each["v"] > 10][:2]
        some = reader.scan(table, where=[("w", "in", [5, w, 1])], ordered=True)
        assert rows_of(some, alone) == [row(key, rows[key]) for key in keys if key[0] in (5, w, 1)]
        for limit in (0, 1, 3, 500):
            where = [("w", ">=", w)]
            scan = reader.scan(table, where=where, ordered=True, limit=limit)
            wanted = [row(key, rows[key]) for key in keys if key[0] >= w][:limit]
            assert scan.to_arrow().to_pylist() == wanted
            assert is_short(scan)
            again = reader.scan(table, where=where, ordered=True, limit=limit)
            assert rows_of(again, alone and limit > 0) == wanted
            some = list(reader.scan(table, where=where, limit=limit))
            assert len(some) == len(wanted)
            assert all(each["w"] >= w and each in map(row, rows, rows.values()) for each in some)
    whole = reader.scan(table, limit=len(keys) + 5, ordered=True).to_arrow().to_pylist()
    assert whole == [row(key, rows[key]) for key in keys]


@pytest.mark.parametrize(("partition", "short"), [(each, each is None) for each in PLACES])
def test_wherever_rows_lie(
    client: txnkv.Client,
    partition: Any,
    short: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`short`: blocks are of a common size; else of five rows, and ranges over many are long."""
    if not short:
        request.getfixturevalue("small_blocks")
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    table = client.create_table("t", SCHEMA, partition)
    rows: Rows = {}

    def put(txn: txnkv.Transaction, **changed: int) -> None:
        """`w1=5` replaces the rows of w = 1 whose number is odd, or by -1 deletes them."""
        for name, v in changed.items():
            for n in range(0 if v % 2 == 0 else 1, 9, 2):
                key = int(name[1:]), f"k{n}"
                if v < 0:
                    txn.delete(table, key)
                    rows.pop(key, None)
                else:
                    txn.upsert(table, row(key, v))
                    rows[key] = v

    steps: list[dict[str, int]] = [
        {"w0": 10, "w1": 11, "w2": 10},
        {"w1": 12, "w2": 13, "w4": 14},
        {"w1": -1, "w3": 15, "w0": 16},
    ]
    for changed in steps:
        with client.transaction() as txn:
            put(txn, **changed)
        same(client.snapshot(), table, rows, short)
        internals.flush(client)
        same(client.snapshot(), table, rows, short)
    with client.transaction() as txn:
        put(txn, w2=-2, w4=18)
    before, kept = client.snapshot(), dict(rows)
    with client.transaction() as txn:
        put(txn, w0=20, w3=-1)
        same(txn, table, rows, short)
        txn.serialize()  # staged from here on
        put(txn, w1=22)
        same(txn, table, rows, short)
        put(txn, w1=-2)
        same(txn, table, rows, short)
    same(client.snapshot(), table, rows, short)
    same(before, table, kept, short)
    internals.compact(client)
    same(client.snapshot(), table, rows, short)
    same(before, table, kept, short)


def test_many_rows_are_scanned_as_ever(client: txnkv.Client) -> None:
    """Up to where a range is short: as many rows; deleted ones before the first may be more."""
    table = client.create_table("t", SCHEMA)
    with client.transaction() as txn:
        for n in range(6000):
            txn.insert(table, row((1, f"{n:05}"), n))
    for flushed in (False, True):
        if flushed:
            internals.flush(client)
        for bound, short in (("00900", True), ("01023", True), ("01024", False), ("05000", False)):
            where = [("w", "=", 1), ("d", "<", bound)]
            scan = table.scan(columns=["v"], where=where, ordered=True)
            assert scan.to_arrow().column("v").to_pylist() == list(range(int(bound)))
            assert is_short(scan) == short
        scan = table.scan(columns=["v"], limit=1500, ordered=True)
        assert scan.to_arrow().column("v").to_pylist() == list(range(1500))
    with client.transaction() as txn:
        for n in range(5500):
            txn.delete(table, (1, f"{n:05}"))
    for limit in (1, 700):
        scan = table.scan(columns=["v"], limit=limit, ordered=True)
        assert scan.to_arrow().column("v").to_pylist() == list(range(5500, 6000))[:limit]
        assert is_short(scan), "they are stepped over"


@pytest.mark.usefixtures("by_hand")  # a compaction in the midst begins anew
def test_what_was_deleted_at_the_front_is_passed_once(client: txnkv.Client) -> None:
    """As in a queue: more than one look passes; and a row that is put there is seen."""
    table = client.create_table("t", QUEUE)
    count = 100_000
    with client.transaction() as txn:
        txn.write(table, pa.table({"q": [1] * count, "n": range(count)}))
    with client.transaction() as txn:
        txn.write(table, pa.table({"q": [1] * 90_000, "n": range(90_000)}), op="delete")
    before, asked = client.snapshot(), {"where": [("q", "=", 1)], "limit": 1, "ordered": True}
    scans = [table.scan(**asked) for _ in range(40)]
    assert [scan.to_arrow().column("n").to_pylist() for scan in scans] == [[90_000]] * 40
    assert is_short(scans[-1]), "each look goes on where the one before gave up"
    table.insert({"q": 1, "n": 7})
    assert [each["n"] for each in table.scan(**asked)] == [7]
    assert [each["n"] for each in before.scan(table, **asked)] == [90_000]
    with client.transaction() as txn:
        txn.write(table, pa.table({"q": [1], "n": [7]}), op="delete")
        assert [each["n"] for each in txn.scan(table, **asked)] == [90_000]


@pytest.mark.parametrize("seed", range(6))
def test_queues(client: txnkv.Client, connect: Callable[..., txnkv.Client], seed: int) -> None:
    """Two queues in one table, taken from the front, beside all that moves rows: as a dict."""
    chance, other = random.Random(seed), connect()
    client.create_table("t", QUEUE)
    rows: set[tuple[int, int]] = set()
    ends, snapshots = [0, 0], [(client.snapshot(), frozenset(rows))]

    def same(reader: Any, there: Any) -> None:
        q, limit = chance.choice([None, 0, 1]), chance.choice([1, 1, 2, 700, None])
        low, high = chance.choice([0, 0, 90]), chance.choice([10_000, 10_000, 300])
        where = [] if q is None else [("q", "=", q), ("n", ">=", low), ("n", "<", high)]
        found = reader.scan("t", where=where, limit=limit, ordered=True)
        wanted = sorted(k for k in there if q is None or (k[0] == q and low <= k[1] < high))
        assert [(row["q"], row["n"]) for row in found] == wanted[:limit]

    for _ in range(120):
        q, by = chance.choice([0, 1]), chance.choice([client, other])
        front = sorted(key for key in rows if key[0] == q)[: chance.choice([1, 70, 400])]
        match chance.randrange(12):
            case 0 | 1:
                some = range(ends[q], ends[q] + chance.choice([1, 50, 500]))
                with by.transaction() as txn:
                    txn.write("t", pa.table({"q": [q] * len(some), "n": some}))
                rows |= {(q, n) for n in some}
                ends[q] = some.stop
            case 2 | 3 if front:
                gone = pa.table(dict(zip("qn", map(list, zip(*front, strict=True)), strict=True)))
                with by.transaction() as txn:
                    txn.write("t", gone, op="delete")
                rows -= {*front}
            case 4 if ends[q]:
                again = q, chance.randrange(ends[q])
                with by.transaction() as txn:
                    txn.upsert("t", {"q": q, "n": again[1]})
                rows.add(again)
            case 5:
                chance.choice([internals.flush, internals.compact])(client)
            case 6:
                snapshots.append((client.snapshot(), frozenset(rows)))
            case 7:
                same(*chance.choice(snapshots))
            case 8:
                txn = by.transaction()
                txn.upsert("t", {"q": q, "n": 5})
                for key in front:
                    txn.delete("t", key)
                same(txn, {*rows, (q, 5)} - {*front})
                txn.rollback()
            case _:
                same(by.snapshot(), rows)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_scan_that_was_read_stays_as_it_was(client: txnkv.Client, by_rows: bool) -> None:
    """It is repeatable, and hands on tokens that are all of it."""
    table = client.create_table("t", SCHEMA)
    for n in range(5):
        table.insert(row((1, str(n)), n))
    scan = table.scan(where=[("w", "=", 1)], ordered=True)
    wanted = list(scan) if by_rows else scan.to_arrow().to_pylist()
    table.delete((1, "2"))
    internals.flush(client)
    internals.compact(client)
    assert list(scan) == wanted
    assert scan.to_arrow().to_pylist() == wanted
    tokens = scan.tokens(rows=2)
    found = [each for token in tokens for each in token.open(client)]
    assert found == wanted
    limited = table.scan(where=[("w", "=", 1)], limit=2, ordered=True)
    assert [each["d"] for each in limited] == ["0", "1"]
    assert [each["d"] for each in limited.tokens()[0].open(client)] == ["0", "1"]


@pytest.mark.parametrize("partition", PLACES, ids=["whole", "by hash", "by range"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_scan_in_a_transaction_leaves_out_what_was_written_since(
    client: txnkv.Client, partition: Any, shared: bool
) -> None:
    """Also where the transaction outgrows its memory, or is handed on, in between."""
    table = client.create_table("t", SCHEMA, partition)
    for n in range(5):
        table.insert(row((1, str(n)), n))
    with client.transaction() as txn:
        txn.delete(table, (1, "0"))
        txn.upsert(table, row((1, "1"), 10))
        txn.upsert(table, row((1, "7"), 7))
        scan, whole = (txn.scan(table, where=w, ordered=True) for w in ([("w", "=", 1)], None))
        wanted = [row((1, d), v) for d, v in [("1", 10), ("2", 2), ("3", 3), ("4", 4), ("7", 7)]]
        assert list(scan) == list(whole) == wanted
        assert scan._bound is None
        assert whole._bound is None
        txn.upsert(table, row((1, "0"), 20))
        txn.upsert(table, row((1, "1"), 21))
        txn.delete(table, (1, "2"))
        txn.upsert(table, row((0, "x"), 22))
        if shared:
            txn.serialize()
            txn.delete(table, (1, "3"))
        assert list(scan) == list(whole) == wanted
        assert scan.to_arrow().to_pylist() == whole.to_arrow().to_pylist() == wanted
        assert list(scan) == wanted
        assert len(list(txn.scan(table))) == (5 if shared else 6)


@pytest.mark.parametrize("partition", PLACES, ids=["whole", "by hash", "by range"])
@pytest.mark.parametrize("flushed", [False, True])
def test_ranges_that_are_open(client: txnkv.Client, partition: Any, flushed: bool) -> None:
    """To one side or both, of few rows: without a plan; also by an index, and the first of them."""
    table = client.create_table("t", SCHEMA, partition)
    client.create_index(table, "v")
    keys = [(n % 4, f"{n:03}") for n in range(300)]
    with client.transaction() as txn:
        for n, key in enumerate(keys):
            txn.insert(table, row(key, n // 10))
    if flushed:
        internals.flush(client)
    rows = [row(key, n // 10) for n, key in enumerate(keys)]
    rows.sort(key=lambda each: (each["w"], each["d"]))

    def check(where: Any, wanted: list[dict[str, Any]], ordered: bool) -> None:
        for limit in (None, 1, 7):
            scan = table.scan(where=where, ordered=ordered, limit=limit)
            found = rows_of(scan)
            if ordered:
                assert found == wanted[:limit]
            else:
                assert len(found) == len(wanted[:limit])
                assert all(each in wanted for each in found)

    for ordered in (False, True):
        check(None, rows, ordered)
        check([("w", ">", 2)], [each for each in rows if each["w"] > 2], ordered)
        check([("w", "<", 1)], [each for each in rows if each["w"] < 1], ordered)
        check([("v", "=", 3)], [each for each in rows if each["v"] == 3], ordered)
        check([("v", ">", 26)], [each for each in rows if each["v"] > 26], ordered)
        check([("v", "<=", 1)], [each for each in rows if each["v"] <= 1], ordered)
        odd = [each for each in rows if each["v"] == 3 and each["d"] > "033"]
        check([("v", "=", 3), ("d", ">", "033")], odd, ordered)


def test_the_index_with_the_fewest_entries_is_taken(client: txnkv.Client) -> None:
    """Of those that narrow a filter alike; and where one leads to too many, the next."""
    schema = txnkv.Schema({"k": "int64", "a": "int64", "b": "int64"}, primary_key=["k"])
    table = client.create_table("u", schema)
    client.create_index(table, "a")
    client.create_index(table, "b")
    count = 70_000
    numbers = pa.array(range(count), pa.int64())
    data = {"k": numbers, "a": pa.array([n % 2 for n in range(count)]), "b": pc.divide(numbers, 5)}
    client.run(lambda txn: txn.write(table, pa.table(data)))
    internals.flush(client)
    where = [("a", "=", 1), ("b", "=", 777)]
    wanted = [{"k": k, "a": 1, "b": 777} for k in (3885, 3887, 3889)]
    scan = table.scan(where=where)
    assert rows_of(scan) == wanted
    planned = table.scan(where=where)
    assert planned.to_arrow().to_pylist() == wanted
    assert is_short(planned)


def test_a_serializable_transaction_is_told_of_changes_in_its_range(client: txnkv.Client) -> None:
    table = client.create_table("t", SCHEMA)
    table.insert(row((1, "b"), 1))
    txn = client.new_transaction(isolation="serializable")
    assert len(list(txn.scan(table, where=[("w", "=", 1)]))) == 1
    table.insert(row((1, "a"), 1))
    txn.upsert(table, row((2, "c"), 1))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()


def test_rows_that_are_given_are_the_callers(client: txnkv.Client) -> None:
    table = client.create_table("t", SCHEMA)
    table.insert(row((1, "b"), 1))
    scan = table.scan(where=[("w", "=", 1)])
    for each in scan:
        each["l"].append(5)
        del each["v"]
    assert list(scan) == [row((1, "b"), 1)]


def test_a_transactions_scan_goes_on_to_see_what_it_first_saw(client: txnkv.Client) -> None:
    """Rows that it writes later are in no scan that was read, whichever way it is read again."""
    table = client.create_table("t", SCHEMA)
    table.insert(row((1, "b"), 1))
    with client.transaction() as txn:
        scan = txn.scan(table, where=[("w", "=", 1)])
        assert rows_of(scan) == [row((1, "b"), 1)]
        other = txn.scan(table, where=[("w", "=", 1)])
        assert list(other) == [row((1, "b"), 1)]
        txn.insert(table, row((1, "c"), 2))
        for each in (scan, other):
            assert list(each) == each.to_arrow().to_pylist() == [row((1, "b"), 1)]
        assert len(list(txn.scan(table, where=[("w", "=", 1)]))) == 2


def test_rows_read_keep_their_snapshot(connect: Callable[..., txnkv.Client]) -> None:
    """A scan that was read by rows keeps its history; one that is closed, or gone, does not."""
    client = connect(history=0)
    runtime = internals.tables(client).store.runtime
    table = client.create_table("t", SCHEMA)
    table.insert(row((1, "b"), 1))
    scan = table.scan(where=[("w", "=", 1)])
    assert list(scan) == [row((1, "b"), 1)]
    seen = scan.snapshot
    assert scan._bound is None
    for v in (2, 3):
        table.upsert(row((1, "b"), v))
        internals.compact(client)
    assert runtime.least_pin() == seen
    assert list(scan) == scan.to_arrow().to_pylist() == [row((1, "b"), 1)]
    scan.close()
    assert runtime.least_pin() is None
    assert list(scan) == [row((1, "b"), 3)]
    del scan
    assert runtime.least_pin() is None
    internals.compact(client)
    with pytest.raises(txnkv.HistoryExpiredError):
        list(table.scan(where=[("w", "=", 1)], snapshot=seen))


def test_what_a_scan_of_few_rows_says_of_itself(client: txnkv.Client) -> None:
    table = client.create_table("t", SCHEMA)
    table.insert(row((1, "b"), 1))
    scan = table.scan(where=[("w", "=", 1)])
    table.alter(add={"n": txnkv.Column("int8", default=7)})
    assert "not read yet" in repr(scan)
    assert list(scan) == [row((1, "b"), 1) | {"n": 7}]
    assert scan.schema.names == ["w", "d", "v", "l", "n"]
    assert repr(scan).endswith(f"at {int(scan.snapshot)}>")
    client.close()
    with pytest.raises(txnkv.ClosedError):
        list(scan)


@pytest.mark.parametrize("columns", [3, 40])
def test_rows_of_any_length_are_read(client: txnkv.Client, columns: int) -> None:
    """Wherever the room for rows ends: in their heads, too, and in one that alone is larger."""
    numbers = {f"n{i}": "int64" for i in range(columns)}
    schema = txnkv.Schema({"k": "int64", "v": "string"} | numbers, primary_key=["k"])
    table = client.create_table("t", schema)
    rows = [(k, "x" * (k * 7 % 61), *range(columns)) for k in range(300)]
    with client.transaction() as txn:
        for each in rows:
            txn.insert(table, each)
    internals.flush(client)
    for low in range(0, 300, 7):
        for n in (1, 2, 5, 40):
            found = list(table.scan(where=[("k", ">=", low), ("k", "<", low + n)], ordered=True))
            assert [tuple(each.values()) for each in found] == rows[low : low + n]
        assert table.count([("k", ">=", low), ("k", "<", low + 9)]) == len(rows[low : low + 9])
    for k in (0, 8, 299) * 3:
        assert table.get(k) == dict(zip(schema.names, rows[k], strict=True))
    table.update({"k": 8, "n0": 5})
    assert table.get(8) == dict(zip(schema.names, rows[8], strict=True)) | {"n0": 5}


def test_many_rows_of_a_few_keys_come_as_they_are_read(client: txnkv.Client) -> None:
    table = client.create_table("t", SCHEMA, txnkv.hash_partition("d", 2))
    with client.transaction() as txn:
        for w in range(4):
            for n in range(400):
                txn.insert(table, row((w, f"{n:03}"), n))
    scan = table.scan(where=[("w", "in", [0, 1, 2, 3])])
    assert sum(1 for _ in scan) == 1600
    assert scan._bound is not None
    large = client.create_table("large", txnkv.Schema({"k": "int32", "v": "binary"}, ["k"]))
    values = [bytes([n]) * (300 << 10) for n in range(6)]
    with client.transaction(timeout=None) as txn:
        for n, value in enumerate(values):
            txn.insert(large, (n, value))
    for _ in range(2):
        found = list(large.scan(where=[("k", ">=", 0), ("k", "<", 9)], ordered=True))
        assert [each["v"] for each in found] == values


def test_no_row_is_below_the_least_key(client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"k": "string", "v": "int64"}, ["k"]))
    with client.transaction() as txn:
        txn.insert(table, ("", 1))
        txn.insert(table, ("b", 1))
    for flushed in (False, True):
        if flushed:
            internals.flush(client)
        scan = table.scan(where=[("k", "<", "")], limit=5)
        assert rows_of(scan, short=False) == []
        assert table.count([("k", "<", "")]) == 0


def test_instants_as_arrow_compares_them(client: txnkv.Client) -> None:
    """Python compares two times of one zone by what its clock shows, an hour a year twice."""
    zone = "timestamp[us, tz=Europe/Berlin]"
    table = client.create_table("t", txnkv.Schema({"k": "int64", "at": zone}, ["k"]))
    early, late = (datetime(2020, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1))
    table.insert((1, early))
    table.insert((2, late))
    for op, n in (("<", 1), ("=", 0), ("<=", 1), ("!=", 2)):
        where = [("k", ">=", 0), ("k", "<", 9), ("at", op, early + timedelta(minutes=15))]
        assert len(rows_of(table.scan(where=where), short=False)) == n
        assert table.count(where) == n


@pytest.mark.parametrize(("kind", "number"), [("date32", 1 << 30), ("timestamp[us]", 1 << 62)])
def test_dates_that_python_cannot_name(client: txnkv.Client, kind: str, number: int) -> None:
    """Who does not look at them is not kept from the rest."""
    table = client.create_table("t", txnkv.Schema({"k": "int64", "at": kind}, ["k"]))
    type_ = table.schema.columns["at"].type
    width = pa.int32() if kind == "date32" else pa.int64()
    given = pa.array([0, number], width).cast(type_)
    with client.transaction() as txn:
        txn.write(table, pa.table({"k": [1, 2], "at": given}))
    both = [("k", ">=", 0), ("k", "<", 9)]
    assert table.count(both) == 2
    assert list(table.scan(["k"], both, ordered=True)) == [{"k": 1}, {"k": 2}]


@pytest.mark.parametrize("at", [0, 1])
def test_there_is_nothing_before_the_first_commit(client: txnkv.Client, at: int) -> None:
    """At Timestamp(0), too, which is no way to say the latest."""
    table = client.create_table("t", SCHEMA)
    table.insert(row((1, "a"), 1))
    assert table.get((1, "a")) is not None
    first = client.snapshot(at=txnkv.Timestamp(at))
    for flushed in (False, True):
        if flushed:
            client.compact()
        assert first.get(table, (1, "a")) is table.get((1, "a"), snapshot=first) is None
        for where in ([("w", "=", 1)], [("w", "=", 1), ("d", "=", "a")], None):
            assert list(first.scan(table, where=where)) == []
        assert table.count(snapshot=first) == 0
        assert len(list(table.scan(where=[("w", "=", 1)]))) == 1


EXACT: dict[str, list[Any]] = {
    "bool": [True, False],
    "int8": [-128, 127],
    "uint64": [0, 2**64 - 1],
    "int64": [-(2**63), 2**63 - 1],
    "float32": [0.5, float("nan"), -0.0],
    "float64": [0.1, float("inf"), float("nan"), -0.0],
    "string": ["", "é\0", "\U0001f600"],
    "binary": [b"", b"\0\xff"],
    "date32": [date(1, 1, 1), date(9999, 12, 31)],
    "decimal128(20,3)": [Decimal("-99999999999999999.999"), Decimal("0.000")],
    "timestamp[us]": [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)],
    "timestamp[us, tz=UTC]": [datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)],
    "timestamp[us, tz=Europe/Berlin]": [datetime(2026, 7, 1, 12, tzinfo=UTC)],
    "time64[us]": [time(23, 59, 59, 999_999)],
    "list<item: int64>": [[], [1, None]],
    "uuid": [UUID(int=7)],
    "json": [{"a": [1.5]}],
}


@pytest.mark.parametrize("kind", EXACT)
def test_few_rows_in_arrow_are_those_of_a_plan(client: txnkv.Client, kind: str) -> None:
    types = {"id": "int64", "v": kind + "?", "of": "string"}
    table = client.create_table("t", txnkv.Schema(types, ["id"]))
    with client.transaction() as txn:
        for id, value in enumerate([None, *EXACT[kind]]):
            txn.insert(table, (id, value, kind))
    asks: list[dict[str, Any]] = [
        {"where": [("id", "<", 9)]},
        {"where": [("id", "=", 77)]},
        {"columns": ["v"], "where": [("id", "in", [1, 0])]},
        {"columns": [], "where": [("id", "in", [1, 0])]},
        {"ordered": True, "limit": 2},
        {"limit": 0},
    ]
    for asked in asks:
        few, all_of_them = table.scan(**asked).to_arrow(), table.scan(**asked)._all_in_arrow()
        assert few.schema == all_of_them.schema
        assert str(few.to_pylist()) == str(all_of_them.to_pylist())
        assert few.num_rows == all_of_them.num_rows


@pytest.mark.parametrize("rows", [50, 51, 2_000])
def test_no_row_is_missing_in_arrow_where_they_are_more_than_few(
    client: txnkv.Client, rows: int
) -> None:
    table = client.create_table("t", txnkv.Schema({"a": "int8", "id": "int64"}, ["a", "id"]))
    with client.transaction() as txn:
        for id in range(rows):
            txn.insert(table, (1, id))
    orders: tuple[Any, ...] = True, "descending"
    for order in orders:
        for limit in (None, 49, 50, 51, rows):
            found = table.scan(where=[("a", "=", 1)], ordered=order, limit=limit).to_arrow()
            wanted = list(range(rows)) if order is True else list(range(rows))[::-1]
            assert found["id"].to_pylist() == wanted[:limit]


def test_long_lists_of_keys_and_wide_rows_want_a_plan_at_once(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were looked for as few rows first: for 100,000 keys that took longer than the scan."""
    types = {"id": "int64", **{f"at{i}": "timestamp[us, tz=Europe/Berlin]?" for i in range(9)}}
    wide = client.create_table("wide", txnkv.Schema(types, ["id"]))
    wide.upsert({"id": 1})
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
    table.insert((7,))
    looked: list[Any] = []
    ranges = Filter.key_ranges
    monkeypatch.setattr(Filter, "key_ranges", lambda *a: (looked.append(a), ranges(*a))[1])
    some = table.scan(where=[("id", "in", range(100_000))])
    assert some.to_arrow()["id"].to_pylist() == [7]
    assert list(table.scan(where=[("id", "in", range(100_000))])) == [{"id": 7}]
    monkeypatch.setattr(Scan, "_find_few", lambda *a: looked.append(a))
    assert wide.scan(where=[("id", "=", 1)]).to_arrow().num_rows == 1
    assert not looked
