"""Gets without a step of Python: whatever makes stale what they remember is noticed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator import commit_log
from txnkv.coordinator.maintenance import Maintenance
from txnkv.coordinator.payload import TABLET, Section

SCHEMA = txnkv.Schema({"k": "int64", "v": "int64", "s": "string?"}, primary_key=["k"])
ROWS = 3_000


def row(k: int, v: int) -> dict[str, Any]:
    return {"k": k, "v": v, "s": None if k % 3 == 0 else f"{k}:{v}"}


@pytest.fixture
def table(client: txnkv.Client, monkeypatch: pytest.MonkeyPatch) -> txnkv.Table:
    """Rows on disk, and one in memory; maintenance by hand."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    table = client.create_table("t", SCHEMA)
    with client.transaction() as txn:
        for k in range(ROWS):
            txn.insert(table, row(k, 0))
    internals.flush(client)
    table.upsert(row(7, 1))
    return table


def short(table: txnkv.Table, key: Any) -> Any:
    """What the short way answers: NotImplemented where the long one is to be gone."""
    assert table._reader is not None
    return table._reader.get(key)


def warm(table: txnkv.Table, **now: int) -> None:
    """By the long way where need be, and then by the short one: rows, and that there is none."""
    versions = {"k7": 1, "k8": 0} | now
    for name, version in versions.items():
        k = int(name[1:])
        wanted = None if version < 0 else row(k, version)
        assert table.get(k) == wanted
        assert short(table, k) == wanted
    assert table.get(-1) is short(table, -1) is None
    assert table.get(ROWS + 5) is short(table, ROWS + 5) is None


def test_rows_of_memory_and_disk(table: txnkv.Table) -> None:
    warm(table)
    assert [table.get(k) for k in range(ROWS)] == [row(k, int(k == 7)) for k in range(ROWS)]


def test_keys_that_are_not_known_at_sight(table: txnkv.Table) -> None:
    warm(table)
    assert short(table, "7") is NotImplemented
    for wrong in ("7", 1 << 70, (7, 8), None):
        with pytest.raises(txnkv.SchemaError):
            table.get(wrong)
    with pytest.raises(TypeError):
        table._reader.get()  # type: ignore[union-attr, call-arg]


def test_commits_of_this_process_are_seen_at_once(table: txnkv.Table) -> None:
    warm(table)
    for version in range(2, 20):
        table.upsert(row(8, version))
        assert short(table, 8) == table.get(8) == row(8, version)
    table.delete(8)
    assert short(table, 8) is table.get(8) is None
    warm(table, k8=-1)


def test_commits_of_others_are_looked_for(table: txnkv.Table, elsewhere: Any) -> None:
    warm(table)
    elsewhere('client.table("t").upsert({"k": 8, "v": 5, "s": "8:5"}); say()')
    assert short(table, 7) is NotImplemented
    warm(table, k8=5)
    elsewhere('client.table("t").delete(8); client.instance.engine.flush(); say()')
    assert short(table, 8) is NotImplemented
    warm(table, k8=-1)


def test_a_snapshot_is_read_on_while_others_commit(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any
) -> None:
    warm(table)
    with client.snapshot() as snapshot:
        elsewhere('client.table("t").upsert({"k": 7, "v": 5, "s": "7:5"}); say()')
        assert short(table, 7) is NotImplemented
        assert table._reader is not None
        assert table._reader.get(7, snapshot.timestamp) == snapshot.get(table, 7) == row(7, 1)
        assert table.get(7) == row(7, 5)
        assert snapshot.get(table, 7) == row(7, 1)


def test_a_commit_that_is_damaged(client: txnkv.Client, table: txnkv.Table) -> None:
    """A read of a snapshot before it let the short way answer for the latest, too."""
    with client.snapshot() as before:
        table.upsert(row(7, 2))
        tables = internals.tables(client)
        (tablet,) = tables.tablets(table.info)
        section = Section(TABLET, tablet.id, b"", 0, 0, None)
        tables.memory.lose(section, internals.latest(client), "gone")
        for _ in range(2):
            with pytest.raises(txnkv.CorruptionError, match="gone"):
                table.get(8)
            assert before.get(table, 8) == row(8, 0)
        assert short(table, 8) is NotImplemented
        tables.memory.damaged.clear()


def test_large_commits_of_others_are_found_with_their_snapshot(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look said that all up to a snapshot is known before it knew the row sets."""
    warm(table)
    log = internals.coordinator(client).log
    version, applied = log.version, log._applied
    elsewhere(
        """
        with client.transaction() as txn:
            txn.upsert("t", {"k": -5, "v": 1, "s": "x"})
            txn.serialize()
        say()
        """
    )
    meanwhile = []

    def new_epoch() -> None:
        meanwhile.append((log.version > version, log._applied == applied))
        real()

    real = commit_log.new_epoch
    monkeypatch.setattr(commit_log, "new_epoch", new_epoch)
    assert table.get(-5) == {"k": -5, "v": 1, "s": "x"}
    assert meanwhile == [(True, True)]


def test_row_sets_that_come_and_go(client: txnkv.Client, table: txnkv.Table) -> None:
    for version in range(2, 5):
        warm(table, k8=version if version > 2 else 0)
        table.upsert(row(8, version + 1))
        internals.flush(client)
        warm(table, k8=version + 1)
        table.delete(100 + version)
        internals.compact(client)
        warm(table, k8=version + 1, **{f"k{100 + version}": -1})


def test_a_map_that_moves_or_is_closed(client: txnkv.Client, table: txnkv.Table) -> None:
    (tablet,) = internals.tables(client).tablets(table.info)
    warm(table)
    assert tablet.environment().close()
    assert short(table, 8) is NotImplemented
    warm(table)
    tablet.environment()._move_map(lambda open_: open_.grow(open_.map_size))
    assert short(table, 8) is NotImplemented
    warm(table)
    for value in (b"to be opened to write", b"and written again"):
        tablet.environment().write(
            lambda txn, value=value: txn.put(b"x", value, db=tablet.fence_db)
        )
        assert short(table, 8) is NotImplemented
        warm(table)
    tablet.environment().write(lambda txn: txn.put(b"x", b"", db=tablet.fence_db))
    assert short(table, 8) is NotImplemented
    assert short(table, 7) == row(7, 1)
    warm(table)


def test_tables_that_are_altered_and_dropped(client: txnkv.Client, table: txnkv.Table) -> None:
    warm(table)
    with client.snapshot() as before:
        table.alter(add={"x": txnkv.Column("int64", default=3)}, drop=["s"])
        assert short(table, 8) is NotImplemented
        for _ in range(2):
            assert table.get(8) == {"k": 8, "v": 0, "x": 3}
            assert table.get(7) == {"k": 7, "v": 1, "x": 3}
            assert before.get(table, 7) == row(7, 1)
    client.drop_table("t")
    for _ in range(2):
        with pytest.raises(txnkv.TableNotFoundError):
            table.get(8)


def test_a_client_that_is_closed(client: txnkv.Client, table: txnkv.Table, connect: Any) -> None:
    other = connect()
    mine = other.table("t")
    warm(mine)
    warm(table)
    other.close()
    with pytest.raises(txnkv.ClosedError):
        mine.get(8)
    warm(table)


def test_snapshots_and_transactions_read_at_theirs(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    warm(table)
    with client.snapshot() as snapshot, client.transaction() as txn:
        for version in (2, 3):
            table.upsert(row(8, version))
            warm(table, k8=version)
            assert snapshot.get(table, 8) == txn.get(table, 8) == row(8, 0)
            internals.flush(client)
            assert snapshot.get(table, 8) == txn.get(table, 8) == row(8, 0)
            internals.compact(client)
        txn.upsert(table, row(9, 4))
        assert txn.get(table, 9) == row(9, 4)
        assert txn.get(table, 10) == row(10, 0)
        txn.delete(table, 10)
        assert txn.get(table, 10) is None
        assert table.get(10) == row(10, 0)


def test_serializable_reads_are_remembered(client: txnkv.Client, table: txnkv.Table) -> None:
    warm(table)
    for key, there in ((8, True), (ROWS + 1, False)):
        txn = client.transaction(isolation="serializable")
        assert (txn.get(table, key) is not None) == there
        txn.upsert(table, row(1, 1))
        table.upsert(row(key, 9))
        with pytest.raises(txnkv.TransactionConflictError):
            txn.commit()


H, R = txnkv.hash_partition, txnkv.range_partition
PLACED: list[tuple[str, Any, bool]] = [
    ("i", H("i", 4), True),
    ("i", R("i", [100, 200]), True),
    ("s", H("s", 4), True),
    ("s", R("s", ["1", "2", "25"]), True),
    ("is", H("i", 4), True),
    ("is", H("s", 4), True),
    ("is", H(["i", "s"], 4), True),
    ("is", [H("s", 2), R("i", [50, 250])], True),
    ("iu", [H("u", 2), H("i", 3), R(["i", "u"], [(50, 5), (250, 0)])], True),
    ("iu", H(["u", "i"], 4), False),
    ("si", H("s", 4), False),
    ("si", H("i", 4), False),
    ("si", H(["s", "i"], 4), True),
    ("ius", R(["u", "s"], [(1, "2"), (1, "25")]), True),
    ("isu", H(["i", "s"], 4), False),
]


@pytest.mark.parametrize(("key", "cut", "known"), PLACED, ids=lambda each: str(each))
def test_a_tablet_that_follows_from_bytes_of_the_key(
    client: txnkv.Client, key: str, cut: Any, known: bool
) -> None:
    """Rows written together and one by one are found by each other's way."""
    types = {"i": "int64", "s": "string", "u": "uint8"}
    schema = txnkv.Schema({name: types[name] for name in key} | {"v": "int64"}, primary_key=[*key])
    table = client.create_table("placed", schema, cut)
    rows = [
        {name: {"i": n - 20, "s": str(n), "u": n % 7}[name] for name in key} | {"v": n}
        for n in range(300)
    ]
    with client.transaction() as txn:
        txn.write(table, pa.Table.from_pylist(rows[::2]))
        for each in rows[1::2]:
            txn.insert(table, each)

    def key_of(row: dict[str, Any]) -> Any:
        found = tuple(row[name] for name in key)
        return found if len(found) > 1 else found[0]

    keys = [key_of(each) for each in rows]
    for flushed in (False, True):
        if flushed:
            internals.flush(client)
        assert [table.get(each) for each in keys] == rows
        # What is at hand is so for a tenth of a second, and a busy machine takes longer.
        tries = ((table.get(keys[7]), short(table, keys[7]))[1] for _ in range(100))
        assert any(found == rows[7] for found in tries) is known
        assert table.get_many(keys).to_pylist() == rows
        assert table.scan(ordered=True).to_arrow().to_pylist() == sorted(rows, key=key_of)
    (nothing,) = {table.get(key_of(each | {"i": 999, "s": "x", "u": 8})) for each in rows[:3]}
    assert nothing is None
    with client.transaction() as txn:
        for each in rows[::3]:
            txn.update(table, each | {"v": -1})
        for each in rows[1::3]:
            txn.delete(table, key_of(each))
    left = [each | {"v": -1} if n % 3 == 0 else each for n, each in enumerate(rows) if n % 3 != 1]
    assert table.scan(ordered=True).to_arrow().to_pylist() == sorted(left, key=key_of)


def test_a_child_reads_for_itself(table: txnkv.Table) -> None:
    warm(table)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fresh = short(table, 8) is NotImplemented
            warm(table)
            code = 0 if fresh else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    warm(table)


def test_threads_beside_commits_flushes_and_compactions(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """A version that was seen is not unseen, whichever way the next get goes."""
    over, wrong = threading.Event(), list[Any]()

    def read() -> None:
        seen = dict.fromkeys(range(20), 0)
        while not over.is_set():
            for k in seen:
                found = table.get(k)
                if found is None or found["v"] < seen[k] or found != row(k, found["v"]):
                    wrong.append((k, seen[k], found))
                    return
                seen[k] = found["v"]

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 16):
        with client.transaction() as txn:
            for k in range(20):
                txn.upsert(table, row(k, version))
        if version % 3 == 0:
            internals.flush(client)
        if version % 7 == 0:
            internals.compact(client)
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []


FEW = {
    "one column": (SCHEMA, None, lambda k: k),
    "hashed": (SCHEMA, txnkv.hash_partition("k", 4), lambda k: k),
    "composite": (
        txnkv.Schema({"s": "string", "k": "int32", "f": "float32?"}, primary_key=["k", "s"]),
        txnkv.range_partition("k", [(10,), (20,)]),
        lambda k: (k, f"{k % 7}"),
    ),
    "of floats": (  # some are asked for by -0.0
        txnkv.Schema({"v": "int64?", "d": "float64"}, primary_key=["d"]),
        None,
        lambda k: (k - 4.0 if k != 9 else float("nan")) or -0.0,
    ),
    "hashed floats": (
        txnkv.Schema({"f": "float32", "d": "float64", "v": "int64?"}, primary_key=["f", "d"]),
        txnkv.hash_partition("f", 4),
        lambda k: (k % 2 - 0.0 or -0.0, k - 7.0 or -0.0),
    ),
    "every plain type": (
        txnkv.Schema(
            {
                "k": "uint64",
                **{f"i{n}": f"int{n}?" for n in (8, 16, 32, 64)},
                **{f"u{n}": f"uint{n}?" for n in (8, 16, 32)},
                **{"f": "float32?", "d": "float64?", "b": "bool?", "s": "string?", "x": "binary?"},
            },
            primary_key=["k"],
        ),
        None,
        lambda k: k + (1 << 63),
    ),
    "of instants": (
        txnkv.Schema({"k": "int64", "t": "timestamp[us, tz=UTC]?"}, primary_key=["k"]),
        None,
        lambda k: k,
    ),
}


def of_schema(schema: txnkv.Schema, k: int, key: Any) -> dict[str, Any]:
    """A row: of the key's columns what the key says, of others all kinds of values."""
    values: dict[str, Any] = dict(
        zip(schema.primary_key, key if isinstance(key, tuple) else (key,), strict=True)
    )
    for at, (name, column) in enumerate(schema.columns.items()):
        kind = str(column.type)
        if name in values:
            continue
        if column.nullable and (k + at) % 5 == 0:
            values[name] = None
        elif kind in ("float", "double"):
            values[name] = [float("nan"), -0.0, 1.5, float("-inf")][k % 4]
        elif kind == "string":
            values[name] = ["", "a", "\u20ac\U0001f600"][k % 3] * (k % 4)
        elif kind == "binary":
            values[name] = bytes([k % 256, 0, 255])[: k % 4]
        elif kind == "bool":
            values[name] = k % 2 == 0
        elif kind.startswith("timestamp"):
            values[name] = datetime(1 + k, 1, 1, tzinfo=UTC)
        else:
            values[name] = -1 if kind[0] == "i" else 255
    return {name: values[name] for name in schema.columns}


@pytest.mark.parametrize("name", FEW)
def test_a_few_keys_give_what_many_give(client: txnkv.Client, name: str) -> None:
    """A list of few keys goes row by row, a tuple never does: Arrow that is equal, byte for byte
    but for what a null hides.
    """
    schema, partitioning, key_of = FEW[name]
    table = client.create_table("few", schema, partition_by=partitioning)
    with client.transaction() as txn:
        for k in range(0, 40, 2):
            txn.insert(table, of_schema(schema, k, key_of(k)))
    internals.flush(client)
    table.upsert(of_schema(schema, 7, key_of(7)))
    table.delete(key_of(8))

    def same(get_many: Callable[[Any], pa.Table], *numbers: int) -> None:
        keys = [key_of(k) for k in numbers]
        few, many = get_many(keys), get_many(tuple(keys))
        assert few.schema == many.schema
        for one, other in zip(few.columns, many.columns, strict=True):
            assert one.is_null().equals(other.is_null())
            kept = [array.combine_chunks().drop_null() for array in (one, other)]
            assert str(kept[0].to_pylist()) == str(kept[1].to_pylist())  # NaN is no NaN's equal
        few.validate(full=True)

    chosen = [(0,), (1,), (7, 8, 9), (4, 4, 5, 4), tuple(range(15)), (39, 0, 20, 7)]
    for numbers in chosen:
        same(table.get_many, *numbers)
    for isolation in ("snapshot", "serializable"):
        with client.transaction(isolation=isolation) as txn:
            same(lambda keys: txn.get_many(table, keys), *range(10))
            txn.delete(table, key_of(0))
            txn.upsert(table, of_schema(schema, 9, key_of(9)))
            for numbers in chosen:
                same(lambda keys: txn.get_many(table, keys), *numbers)
            txn.rollback()
    assert table.get_many([]).num_rows == 0
    for wrong in ([None], ["a", key_of(1)], [key_of(1), (1, 2, 3)], [object()]):
        errors = []
        for keys in (wrong, tuple(wrong)):
            with pytest.raises(txnkv.SchemaError) as told:
                table.get_many(keys)
            errors.append(str(told.value))
        assert errors[0] == errors[1]
