"""Indexes: made, written in every way, read by, refused and dropped."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.tables.people import SCHEMA, batch, ids
from txnkv.client import indexes
from txnkv.storage import backup_files, directory
from txnkv.tables import TableEngine, arrow_input
from txnkv.tables.read.sources import ShortPart


def test_what_is_there_is_said(client: txnkv.Client, unique: txnkv.Table) -> None:
    assert unique.indexes == [
        txnkv.Index(("mail",), True, "ready"),
        txnkv.Index(("n",), False, "ready"),
    ]
    assert client.create_index("people", ["mail"], unique=True) == unique.indexes[0]
    assert client.tables() == ["people"]
    assert list(client.stats()["tables"]) == ["people"]
    client.drop_index("people", "n")
    assert [each.columns for each in unique.indexes] == [("mail",)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("male", "there is no column 'male'; there are id, mail"),
        (["mail", "mail"], "each once"),
        ([], "one or more columns"),
        ("tags", "whose values have no order"),
    ],
)
def test_columns_that_no_index_can_be_by(
    client: txnkv.Client, people: txnkv.Table, columns: Any, said: str
) -> None:
    with pytest.raises(txnkv.SchemaError, match=said):
        client.create_index(people, columns)
    assert people.indexes == []


def test_an_index_that_is_not_there(client: txnkv.Client, unique: txnkv.Table) -> None:
    with pytest.raises(txnkv.SchemaError, match=r"no index by n, mail; there are: mail; n"):
        client.drop_index(unique, ["n", "mail"])
    with pytest.raises(txnkv.SchemaError, match=r"client.create_index\('people', \['n', 'mail'\]"):
        unique.get_by(["n", "mail"], (1, "m1"))
    with pytest.raises(txnkv.SchemaError, match="2 values for the columns mail"):
        unique.get_by("mail", ("m1", "m2"))
    with pytest.raises(txnkv.SchemaError, match="which is unique: client"):
        client.create_index(unique, "mail")


def test_rows_are_found(client: txnkv.Client, unique: txnkv.Table) -> None:
    assert ids(unique.get_by("mail", "m7")) == [7]
    assert ids(unique.get_by("n", 3)) == list(range(3, 40, 5))
    assert unique.get_by("mail", "nobody") == unique.get_by("mail", None) == []
    client.create_index(unique, ["n", "mail"])
    assert ids(unique.get_by(["n", "mail"], (1, "m6"))) == [6]
    assert ids(unique.get_by(["n", "mail"], [1, "m6"])) == [6]


@pytest.mark.parametrize("columns", [["id", "n"], ["n"], []])
def test_scans_go_by_the_index(
    client: txnkv.Client, unique: txnkv.Table, columns: list[str]
) -> None:
    internals.flush(client)
    scan = unique.scan(columns, where=[("mail", "=", "m7"), ("n", ">", 0)])
    assert all(type(part) is ShortPart for part in scan._planned().parts)
    assert sum(batch.num_rows for batch in scan.to_batches()) == 1
    ordered = unique.scan(where=[("n", "=", 2)], ordered=True, limit=3)
    assert [row["id"] for row in ordered] == [2, 7, 12]
    assert unique.count([("mail", ">=", "m38")]) == len(["m38", "m39", "m5", "m6", "m7", "m9"])
    some = unique.scan(where=[("mail", "in", ["m7", "m9", "nobody", "m7"]), ("n", "<", 4)])
    assert ids(some) == [7]
    assert all(type(part) is ShortPart for part in some._planned().parts)
    by_key = unique.scan(where=[("id", "=", 7), ("n", ">=", 0)])._planned()
    assert by_key.filter.columns == ("id", "n")
    tokens = unique.scan(where=[("n", "=", 2)]).tokens()
    assert ids(row for token in tokens for row in token.open(client)) == list(range(2, 40, 5))


def test_a_row_without_a_value_is_found_by_no_index(unique: txnkv.Table) -> None:
    assert ids(unique.scan(where=[("mail", "is null")])) == list(range(0, 40, 4))
    assert ids(unique.scan(where=[("mail", "!=", "m1")])) == [i for i in range(2, 40) if i % 4]
    for id in (100, 101):
        unique.insert({"id": id, "mail": None, "n": 1})


def test_by_columns_of_the_key(client: txnkv.Client, size: str) -> None:
    schema = txnkv.Schema({"a": "int64", "b": "string", "v": "int64?"}, primary_key=["a", "b"])
    table = client.create_table("pairs", schema, txnkv.hash_partition("a", 2))
    client.create_index(table, "b")
    client.create_index(table, ["v", "a"], unique=True)
    rows = {"a": range(20), "b": [f"b{i % 4}" for i in range(20)], "v": range(20)}
    with client.transaction() as txn:
        txn.write(table, pa.table(rows))
        txn.write(table, pa.table(rows | {"v": range(1, 21)}), "upsert")
    assert [row["a"] for row in table.get_by("b", "b1")] == [1, 5, 9, 13, 17]
    assert table.get_by(["v", "a"], (4, 3)) == [{"a": 3, "b": "b3", "v": 4}]
    with client.transaction() as txn:
        keys = {"a": range(10), "b": [f"b{i % 4}" for i in range(10)]}
        txn.write(table, pa.table(keys), "delete")
    assert [row["a"] for row in table.get_by("b", "b1")] == [13, 17]
    table.delete((13, "b1"))
    assert [row["a"] for row in table.scan(where=[("b", "=", "b1")])] == [17]
    with pytest.raises(txnkv.RowErrors):
        table.insert({"a": 17, "b": "b2", "v": 18})


def test_many_rows_are_scanned(client: txnkv.Client, people: txnkv.Table) -> None:
    people_many = batch(range(100, 9_000), [None] * 8_900)
    with client.transaction() as txn:
        txn.write(people, people_many)
    client.create_index(people, "n")
    scan = people.scan(where=[("n", ">=", 0)])
    assert not any(type(part) is ShortPart for part in scan._planned().parts)
    assert people.count([("n", ">=", 0)]) == 8_940
    assert len(people.get_by("n", 1)) == 1_788


# -- unique ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["insert", "upsert"])
def test_a_value_that_another_row_has(unique: txnkv.Table, op: str, size: str) -> None:
    row = {"id": 50, "mail": "m7", "n": 0}
    with pytest.raises(txnkv.RowErrors, match="another row has mail = 'm7'") as caught:
        getattr(unique, op)(row)
    (error,) = caught.value.errors
    assert (error.op, error.key) == (op, 50)
    assert isinstance(error.error, txnkv.AlreadyPresentError)
    assert unique.get(50) is None


def test_a_value_is_free_again(client: txnkv.Client, unique: txnkv.Table, size: str) -> None:
    unique.delete(7)
    unique.insert({"id": 50, "mail": "m7", "n": 0})
    with client.transaction() as txn:
        txn.update(unique, {"id": 50, "mail": "m50"})
        txn.insert(unique, {"id": 51, "mail": "m7", "n": 0})
    assert ids(unique.get_by("mail", "m7")) == [51]


def test_values_may_be_swapped_by_one_write(unique: txnkv.Table, client: txnkv.Client) -> None:
    with client.transaction() as txn:
        txn.write(unique, batch([1, 2, 3], ["m2", "m3", "m1"]), "upsert")
    assert [row["mail"] for row in unique.scan(where=[("id", "<", 4)], ordered=True)] == [
        None, "m2", "m3", "m1",
    ]  # fmt: skip


def test_one_that_is_refused_refuses_who_counted_on_it(
    client: txnkv.Client, unique: txnkv.Table, size: str
) -> None:
    """3 does not get m9, so it keeps m3, so 2 does not get it, and so on."""
    with client.new_session() as session:
        with pytest.raises(txnkv.RowErrors) as caught:
            session.write(unique, batch([3, 1, 5, 2], ["m9", "m2", "m500", "m3"]), "upsert")
        told = [(error.key, str(error.error).split("'")[1]) for error in caught.value.errors]
        assert told == [(3, "m9"), (1, "m2"), (2, "m3")]  # in the order of the data
    assert ids(unique.get_by("mail", "m500")) == [5]


def test_a_long_chain_of_moves_ends(client: txnkv.Client, unique: txnkv.Table) -> None:
    with client.transaction() as txn:
        txn.write(unique, batch(range(100, 200), [f"x{i}" for i in range(100, 200)]))
    moved = batch(range(100, 200), [f"x{i + 1}" for i in range(100, 199)] + ["m1"])
    with client.new_session() as session, pytest.raises(txnkv.RowErrors) as caught:
        session.write(unique, moved, "upsert")
    assert caught.value.count == 100
    assert ids(unique.get_by("mail", "x150")) == [150]


def test_two_rows_of_one_write_with_one_value(
    client: txnkv.Client, unique: txnkv.Table, size: str
) -> None:
    with client.new_session() as session:
        with pytest.raises(txnkv.RowErrors, match="another row of the same data") as caught:
            session.write(unique, batch([60, 62, 64], ["x", "x", "y"]))
        assert caught.value.count == 1
        result = session.write(unique, batch([70, 71], ["x", "z"]), "insert_ignore")
        assert (result.inserted, result.ignored) == (1, 1)
    assert unique.count([("mail", "=", "x")]) == 1
    assert unique.get_by("mail", "z") != []


def test_counts_leave_out_what_is_refused(client: txnkv.Client, unique: txnkv.Table) -> None:
    with client.new_session() as session:
        with pytest.raises(txnkv.RowErrors):
            session.write(unique, batch([1, 80, 80, 81], ["m2", "m2", "m2", "ok"]), "upsert")
        result = session.write(unique, batch([1, 2], ["m5", "new"]), "update_ignore")
        assert (result.updated, result.ignored) == (1, 1)


def test_writes_of_several_chunks(
    client: txnkv.Client, unique: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_input, "CHUNK_ROWS", 7)
    with client.transaction() as txn:
        txn.serialize()
        txn.write(unique, batch(range(40), [f"y{i}" for i in range(40)]), "upsert")
        txn.write(unique, batch(range(100, 140), [f"m{i}" for i in range(40)]))
        assert ids(txn.scan(unique, where=[("mail", "=", "m4")])) == [104]
    assert ids(unique.get_by("mail", "y39")) == [39]


def test_who_commits_first_wins(client: txnkv.Client, unique: txnkv.Table, size: str) -> None:
    first, second = client.new_transaction(), client.new_transaction()
    first.insert(unique, {"id": 50, "mail": "x", "n": 0})
    second.insert(unique, {"id": 51, "mail": "x", "n": 0})
    first.commit()
    with pytest.raises(txnkv.TransactionConflictError, match=r"people \(index by mail\)") as caught:
        second.commit()
    assert caught.value.retriable
    with pytest.raises(txnkv.RowErrors):
        client.run(lambda txn: txn.insert(unique, {"id": 51, "mail": "x", "n": 0}))


def test_a_race_of_threads_and_processes(
    client: txnkv.Client, unique: txnkv.Table, process: Callable[..., Any]
) -> None:
    """Each value is given to one of all who want it."""
    code = """
    table, won = client.table("people"), []
    say()
    wait()
    for i in range(30):
        try:
            table.insert({"id": first + i, "mail": f"r{i}", "n": 0})
            won.append(i)
        except txnkv.RowErrors:
            pass
    say(won)
    """
    others = [process(code, first=first) for first in (1000, 2000)]
    for each in others:
        each.hear()
    won: list[int] = []

    def insert(first: int) -> None:
        for i in range(30):
            try:
                unique.insert({"id": first + i, "mail": f"r{i}", "n": 0})
                won.append(i)
            except txnkv.RowErrors:
                pass

    threads = [threading.Thread(target=insert, args=(first,)) for first in (3000, 4000)]
    for each in others:
        each.tell()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in others:
        won += each.hear()
    assert sorted(won) == list(range(30))
    assert unique.count([("id", ">=", 1000)]) == 30


# -- beside others -------------------------------------------------------------------------


def test_rows_that_have_one_value_already(client: txnkv.Client, people: txnkv.Table) -> None:
    people.insert({"id": 50, "mail": "m7", "n": 0})
    with pytest.raises(txnkv.RowErrors, match="refused, and no index was made: create_index into"):
        client.create_index(people, "mail", unique=True)
    assert people.indexes == []
    people.delete(50)
    client.create_index(people, "mail", unique=True)


def test_transactions_from_before_run_again(
    client: txnkv.Client, people: txnkv.Table, size: str
) -> None:
    txn = client.new_transaction()
    txn.insert(people, {"id": 50, "mail": "m50", "n": 0})
    txn.flush()
    client.create_index(people, "mail", unique=True)
    with pytest.raises(txnkv.SchemaChangedError):
        txn.commit()
    client.run(lambda txn: txn.insert(people, {"id": 50, "mail": "m50", "n": 0}))
    assert ids(people.get_by("mail", "m50")) == [50]
    txn = client.new_transaction()
    txn.insert(people, {"id": 51, "mail": "m51", "n": 0})
    txn.flush()
    client.drop_index(people, "mail")
    with pytest.raises(txnkv.SchemaChangedError):
        txn.commit()


def test_snapshots_from_before(client: txnkv.Client, people: txnkv.Table) -> None:
    with client.snapshot() as before:
        client.create_index(people, "mail", unique=True)
        people.update({"id": 7, "mail": "other"})
        with client.snapshot() as between:
            people.delete(7)
            assert ids(people.get_by("mail", "other", between)) == [7]
            client.drop_index(people, "mail")
            assert ids(people.get_by("mail", "other", between)) == [7]
            client.create_index(people, "mail")
            assert between.get(people, 9) == people.get(9)
            where = [("mail", "=", "other")]
            assert ids(between.scan(people, where=where)) == [7]
            assert ids(between.scan(people, where=[("mail", "=", "m9")])) == [9]
            assert ids(people.scan(where=where)) == ids(before.scan(people, where=where)) == []


def test_a_snapshot_of_before_is_scanned(client: txnkv.Client, people: txnkv.Table) -> None:
    """It was said that there is no index, and to make the one that is there."""
    with client.snapshot() as before:
        client.create_index(people, "mail")
        assert ids(people.get_by("mail", "m7", before)) == [7]
        people.alter(add={"late": "int64?"})
        client.create_index(people, "late")
        with pytest.raises(txnkv.SchemaError, match="there is no column 'late'"):
            people.get_by("late", 1, before)


def test_a_session_of_another_process_learns_of_it(
    client: txnkv.Client, people: txnkv.Table, process: Callable[..., Any]
) -> None:
    other = process("""
    table = client.table("people")
    session = client.new_session()
    session.insert(table, {"id": 60, "mail": "m60", "n": 0})
    say()
    wait()
    session.insert(table, {"id": 61, "mail": "m61", "n": 0})
    session.flush()
    table.insert({"id": 62, "mail": "m62", "n": 0})
    say()
    """)
    other.hear()
    client.create_index(people, "mail", unique=True)
    other.tell()
    other.finish()
    assert [ids(people.get_by("mail", f"m{i}")) for i in (60, 61, 62)] == [[60], [61], [62]]


def test_built_beside_writers(
    client: txnkv.Client, people: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "_FIRST_ROWS", 5)
    monkeypatch.setattr(indexes, "_MOST_ROWS", 50)
    over = threading.Event()
    failed: list[BaseException] = []

    def work(first: int) -> None:
        number = 0
        try:
            while not over.is_set():
                number += 1
                id, new = first + number % 20, f"w{first}.{number}"
                client.run(lambda txn, id=id, new=new: move(txn, id, new))
        except BaseException as error:
            failed.append(error)

    def move(txn: txnkv.Transaction, id: int, new: str) -> None:
        if id % 3 == 0:
            txn.delete_ignore(people, id)
        else:
            txn.upsert(people, {"id": id, "mail": new, "n": id % 7})

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 20)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            client.create_index(people, "mail", unique=True)
            client.create_index(people, ["n", "mail"])
            assert client.check().problems == []
            client.drop_index(people, "mail")
            client.drop_index(people, ["n", "mail"])
        client.create_index(people, "mail", unique=True)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failed == []
    for row in people.scan():
        if row["mail"] is not None:
            assert people.get_by("mail", row["mail"]) == [row]


def test_partition_locks(client: txnkv.Client, unique: txnkv.Table) -> None:
    with client.transaction(locking="partition") as txn:
        txn.write(unique, batch(range(40), [f"y{i}" for i in range(40)]), "upsert")
        with pytest.raises(txnkv.TransactionLockedError):
            unique.insert({"id": 90, "mail": "m90", "n": 0})
        txn.insert(unique, {"id": 91, "mail": "m1", "n": 0})
    assert ids(unique.get_by("mail", "m1")) == [91]
    assert ids(unique.get_by("mail", "y1")) == [1]


NAN = float("nan")


@pytest.mark.parametrize("by", [["f"], ["f", "id"]], ids=str)
def test_floats_that_are_no_number_or_zero(client: txnkv.Client, by: list[str]) -> None:
    """A list with NaN narrows nothing: its other values lead to their rows once. -0.0 is 0.0."""
    schema = txnkv.Schema({"id": "int64", "f": "float64?"}, ["id"])
    floats = client.create_table("floats", schema)
    rows = [1.0, NAN, -0.0, 0.0, None, 2.0]
    with client.transaction() as txn:
        for id, value in enumerate(rows):
            txn.insert(floats, {"id": id, "f": value})
    lists = {(1.0, NAN): [0, 1], (NAN,): [1], (0.0, 2.0): [2, 3, 5], (-0.0,): [2, 3], (): []}
    for _ in range(2):
        for values, wanted in lists.items():
            assert ids(floats.scan(where=[("f", "in", list(values))])) == wanted, values
        client.create_index(floats, by)
    if by == ["f"]:
        assert ids(floats.get_by("f", -0.0)) == ids(floats.get_by("f", 0.0)) == [2, 3]
        assert ids(floats.get_by("f", NAN)) == [1]
        with client.new_session() as session:
            session.write(floats, pa.table({"id": range(100, 2000), "f": [NAN] * 1900}))
        assert len(floats.get_by("f", NAN)) == 1901  # so many that they are scanned


def test_reads_by_an_index_are_validated(client: txnkv.Client, unique: txnkv.Table) -> None:
    txn = client.new_transaction(isolation="serializable")
    assert list(txn.scan(unique, where=[("mail", "=", "x")])) == []
    unique.insert({"id": 50, "mail": "x", "n": 0})
    txn.insert(unique, {"id": 51, "mail": "y", "n": 0})
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    unique.insert({"id": 52, "mail": "z", "n": 0})  # elsewhere in the index: no conflict
    txn = client.new_transaction(isolation="serializable")
    assert ids(txn.scan(unique, where=[("mail", "=", "z")])) == [52]
    unique.insert({"id": 53, "mail": "zz", "n": 0})
    txn.insert(unique, {"id": 54, "mail": "y", "n": 0})
    txn.commit()


# -- a table that changes ------------------------------------------------------------------


def test_columns_of_an_index(client: txnkv.Client, unique: txnkv.Table) -> None:
    for change in ({"drop": ["mail"]}, {"widen": {"n": "int64"}}):
        with pytest.raises(txnkv.SchemaError, match=r"drop_index\(table, \['(mail|n)'\]\) first"):
            unique.alter(**change)  # type: ignore[arg-type]
    unique.alter(add={"extra": "string?"}, rename={"mail": "address"}, drop=["tags"])
    assert [each.columns for each in unique.indexes] == [("address",), ("n",)]
    assert ids(unique.get_by("address", "m7")) == [7]
    with pytest.raises(txnkv.RowErrors, match="another row has address = 'm7'"):
        unique.insert({"id": 50, "address": "m7", "n": 1})
    client.rename_table(unique, "persons")
    assert ids(client.table("persons").scan(where=[("address", "=", "m9")])) == [9]
    copy = client.create_table("copy", unique.schema)
    assert copy.indexes == []


def test_dropped_and_recalled(client: txnkv.Client, unique: txnkv.Table) -> None:
    client.drop_table("people", keep=600)
    with pytest.raises(txnkv.TableNotFoundError, match="kept are: people"):
        client.recall_table("nothing")
    client.recall_table("people")
    assert ids(unique.get_by("mail", "m7")) == [7]
    unique.upsert({"id": 7, "mail": "m77", "n": 1})
    assert unique.get_by("mail", "m7") == []
    client.drop_table("people")
    assert not list(Path(client.path, "tablets").iterdir())


def test_restored_rows(client: txnkv.Client, unique: txnkv.Table) -> None:
    with client.snapshot() as before:
        with client.transaction() as txn:
            txn.write(unique, batch([1, 2, 3], ["m2", "m3", "m1"]), "upsert")
            txn.delete(unique, 5)
            txn.insert(unique, {"id": 50, "mail": "m5", "n": 0})
        result = unique.restore(before)
    assert (result.inserted, result.updated, result.deleted) == (1, 3, 1)
    assert [ids(unique.get_by("mail", f"m{i}")) for i in (1, 2, 3, 5)] == [[1], [2], [3], [5]]


def test_indexes_with_the_same_key(client: txnkv.Client, people: txnkv.Table) -> None:
    """Entries of an index by mail have the key of those of one by mail and id."""
    client.create_index(people, "n")
    client.create_index(people, ["mail", "id"])
    client.drop_index(people, "n")
    client.create_index(people, "mail")
    assert ids(people.get_by("mail", "m7")) == ids(people.get_by(["mail", "id"], ("m7", 7))) == [7]


def test_names_of_hidden_tables(client: txnkv.Client, unique: txnkv.Table) -> None:
    with internals.status(client).read() as cur:
        names = [name for (name,) in cur.execute("SELECT name FROM tables ORDER BY id")]
    assert [name[0] for name in names] == ["p", "\x1f", "\x1f"]
    with pytest.raises(txnkv.TableNotFoundError):
        client.table(names[1])
    for make in (lambda: client.create_table("\x1f1", SCHEMA), lambda: rename(client, "\x1f1")):
        with pytest.raises(ValueError, match="does not begin with"):
            make()


def rename(client: txnkv.Client, name: str) -> object:
    return client.rename_table("people", name)


# -- a store that has indexes --------------------------------------------------------------


def test_versions_without_indexes_refuse_the_store(
    client: txnkv.Client,
    people: txnkv.Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = tmp_path / "plain"
    client.backup(plain)
    client.create_index(people, "mail")
    assert "columns" not in json.loads(people.schema.to_json())  # for who has it open by now
    client.backup(tmp_path / "backup")
    with monkeypatch.context() as patch:
        patch.setattr(directory, "KNOWN_FEATURES", frozenset())
        patch.setattr(backup_files, "KNOWN_FEATURES", frozenset())
        with pytest.raises(txnkv.IncompatibleStoreError, match="indexes"):
            directory.StoreDirectory.open(client.path)
        with pytest.raises(txnkv.IncompatibleStoreError):
            txnkv.restore(tmp_path / "backup", tmp_path / "no")
        txnkv.restore(plain, tmp_path / "old")
    txnkv.restore(tmp_path / "backup", tmp_path / "new")
    with txnkv.connect(tmp_path / "new") as restored:
        table = restored.table("people")
        assert ids(table.get_by("mail", "m7")) == [7]
        table.delete(7)
        assert restored.check().problems == []
    assert directory.StoreDirectory.open(tmp_path / "new").features == ["indexes"]
    assert directory.StoreDirectory.open(tmp_path / "old").features == []


def test_check_finds_an_index_out_of_step(
    client: txnkv.Client, unique: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(TableEngine, "indexes", lambda self, table: ())
        internals.tables(client)._writers.clear()
        unique.insert({"id": 50, "mail": "m50", "n": 0})
        unique.delete(7)
    internals.tables(client)._writers.clear()
    said = "rows without an entry: 1, entries without a row: 1 of 30"
    assert [said in problem for problem in client.check().problems] == [True, False]
    assert list(unique.scan(where=[("mail", "=", "m7")])) == []
    for columns in ("mail", "n"):
        client.drop_index(unique, columns)
    client.create_index(unique, "mail", unique=True)
    assert client.check().problems == []


def test_a_part_that_is_given_up_has_no_indexes(client: txnkv.Client, unique: txnkv.Table) -> None:
    with pytest.raises(txnkv.NotSupportedError, match="drop_index"):
        client.accept_loss("people (index by mail)/0")
    assert not client.accept_loss("people/0").indexes
    assert len(unique.indexes) == 2, "nothing was lost"
    with internals.status(client).write() as cur:  # of more rows than there are
        cur.execute("UPDATE row_sets SET rows = 99 WHERE tablet_id = ?", unique.info.tablets[:1])
    loss = client.accept_loss("people/0", dry_run=True)
    assert (loss.indexes, len(unique.indexes)) == ((("mail",), ("n",)), 2)
    assert "the index of the table by n is dropped" in list(loss.lines())[-1]
    assert (client.accept_loss("people/0"), unique.indexes) == (loss, [])


def test_nan_in_the_key_of_a_row(client: txnkv.Client) -> None:
    """Its entry was called another's: by `check`, by an index that is built, by the advice."""
    schema = txnkv.Schema({"key": "float64", "v": "int64"}, primary_key=["key"])
    table = client.create_table("floats", schema)
    for key in (math.nan, 1.0):
        table.upsert((key, int(key == 1.0)))
    client.create_index(table, "v", unique=True)
    assert client.check().problems == []
    table.delete(math.nan)
    with client.new_session() as session:
        session.write(table, pa.table({"key": [math.nan, 2.0], "v": [2, 0]}), "upsert")
    client.drop_index(table, "v")
    client.create_index(table, "v", unique=True)
    assert client.check().problems == []
    assert table.get_by("v", 0) == [{"key": 2.0, "v": 0}]
