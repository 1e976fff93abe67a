"""Transactions over a server whose tables are altered: they have the columns of their begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from txnkv.remote import pack
from txnkv.remote.remote_handles import RemoteTable
from txnkv.server import answering

SCHEMA = txnkv.Schema({"id": "int64", "a": "int64?", "b": "int64?"}, primary_key=["id"])
CHANGES: list[tuple[dict[str, Any], dict[str, int | None]]] = [
    ({"rename": {"a": "b", "b": "a"}}, {"b": 10, "a": 20}),
    ({"drop": ["a"], "rename": {"b": "a"}}, {"a": 20}),
    ({"drop": ["a"], "add": {"a": "int64?"}}, {"b": 20, "a": None}),
    ({"add": {"c": txnkv.Column("int64", default=7)}}, {"a": 10, "b": 20, "c": 7}),
]
"""How a table is altered, and what a row of before has then."""

Remote = Callable[..., txnkv.Client]


@pytest.fixture(params=["folder", "server", "server, another's"])
def both(request: Any, store: txnkv.Client, remote: Remote) -> tuple[txnkv.Client, txnkv.Client]:
    """Who has the transaction, and who alters."""
    if request.param == "folder":
        return store, store
    client = remote()
    return client, client if request.param == "server" else remote()


@pytest.mark.parametrize("how", ["transaction", "session", "joined", "by name"])
@pytest.mark.parametrize("row", [(1, 10, 20), {"id": 1, "a": 10, "b": 20}], ids=["tuple", "dict"])
@pytest.mark.parametrize(("change", "after"), CHANGES, ids=lambda change: " ".join(change))
def test_a_large_transaction_goes_on(
    both: tuple[txnkv.Client, txnkv.Client], change: Any, after: Any, row: Any, how: str
) -> None:
    client, other = both
    table = client.create_table("altered", SCHEMA)
    txn = client.new_transaction()
    token = txn.serialize()
    other.table("altered").alter(**change)
    assert table.schema.names[0] == "id"  # the client knows the new ones by now
    named: Any = "altered" if how == "by name" else table
    if how == "session":
        with txn.new_session() as session:
            session.upsert(named, row)
    elif how == "joined":
        with txnkv.Transaction.deserialize(client, token) as joined:
            joined.insert(named, row)
    else:
        txn.insert(named, row)
    assert txn.get(table, 1) == {"id": 1, "a": 10, "b": 20}
    txn.commit()
    assert table.get(1) == {"id": 1, **after}


@pytest.mark.parametrize("row", [(1, 10, 20), {"id": 1, "a": 10, "b": 20}], ids=["tuple", "dict"])
@pytest.mark.parametrize(("change", "after"), CHANGES, ids=lambda change: " ".join(change))
def test_a_small_transaction_is_tried_again(
    both: tuple[txnkv.Client, txnkv.Client], change: Any, after: Any, row: Any
) -> None:
    client, other = both
    table = client.create_table("altered", SCHEMA)
    attempts: list[int] = []

    def work(txn: txnkv.Transaction) -> None:
        attempts.append(txn.id)
        txn.get(table, 1)
        if len(attempts) == 1:
            other.table("altered").alter(**change)
            assert table.schema.names[0] == "id"  # the client knows the new ones by now
            txn.insert(table, row)
        else:
            txn.insert(table, {"id": 1, **after})

    client.run(work)
    assert len(attempts) == 2
    assert table.get(1) == {"id": 1, **after}


def test_a_table_that_is_made_in_a_transaction(both: tuple[txnkv.Client, txnkv.Client]) -> None:
    client, other = both
    with client.transaction() as txn:
        txn.insert("t", (1, "a"))
        made = other.create_table("later", SCHEMA)
        txn.insert("later", (1, 10, 20))
        txn.insert("later", {"id": 2, "b": 5})
    assert made.count() == 2


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"rename": {"a": "b", "b": "a"}}, {"id": 1, "a": 10, "b": 20}),
        ({"drop": ["a"], "rename": {"b": "a"}}, {"id": 1, "a": 10}),
        ({"drop": ["a"], "add": {"a": "int64?"}}, {"id": 1, "a": 10, "b": 20}),
    ],
    ids=["swapped", "given on", "made anew"],
)
def test_nothing_goes_into_the_column_that_had_the_name(
    store: txnkv.Client, remote: Remote, change: Any, again: Any
) -> None:
    """Nor is it lost, where a client writes that has not heard of the change."""
    there, other = remote(), remote()
    for n, give in enumerate((_run, _flush, _commit_async)):
        here = store.create_table(f"t{n}", SCHEMA)
        table = there.table(f"t{n}")
        other.table(f"t{n}").alter(**change)
        give(there, table, {"id": 1, "a": 10, "b": 20}, again)
        assert here.get(1) == again


FALLEN = [{"id": 1, "a": 1}, {"id": 2, "a": None}, {"id": 3, "a": 3}]
"""Rows, of which a change refuses the second."""


@pytest.mark.parametrize("how", ["commit", "commit_async"])
def test_rows_that_do_not_fit_any_more_take_their_transaction_along(
    store: txnkv.Client, remote: Remote, how: str
) -> None:
    """Rows behind them were lost, and a second commit committed those before."""
    there = [store.create_table(name, SCHEMA) for name in ("t8", "t9")]
    client = remote()
    first, second = client.table("t8"), client.table("t9")
    txn = client.new_transaction()
    for row in FALLEN:
        txn.insert(first, row)
    txn.insert(second, {"id": 1})
    there[0].alter(nullable={"a": False})
    for told in (txnkv.SchemaChangedError, txnkv.InvalidTxnStateError):
        with pytest.raises(told):
            txn.commit() if how == "commit" else txn.commit_async().result()
    assert txn.state is txnkv.TxnState.ABORTED
    assert [table.count() for table in there] == [0, 0]


def test_rows_that_do_not_fit_any_more_are_refused_by_themselves(
    store: txnkv.Client, remote: Remote
) -> None:
    here = store.create_table("t9", SCHEMA)
    client = remote()
    table, session = client.table("t9"), client.new_session()
    for row in FALLEN:
        session.insert(table, row)
    session.delete(table, 7)
    here.alter(nullable={"a": False})
    with pytest.raises(txnkv.RowErrors, match="not nullable") as refused:
        session.flush()
    assert sorted(each.key for each in refused.value.errors) == [2, 7]
    assert [row["id"] for row in here.scan()] == [1, 3]


def test_a_row_that_names_no_changed_column_is_taken(store: txnkv.Client, remote: Remote) -> None:
    here, table = store.create_table("t9", SCHEMA), remote().table("t9")
    session = remote().new_session()
    session.upsert(table, {"id": 1, "b": 2})
    session.upsert(table, {"id": 2, "a": 2})
    here.alter(rename={"a": "x"}, add={"a": "int64?"})
    with pytest.raises(txnkv.RowErrors, match="was altered") as refused:
        session.flush()
    assert [each.key for each in refused.value.errors] == [2]
    assert list(here.scan()) == [{"id": 1, "x": None, "b": 2, "a": None}]


def test_rows_that_name_few_of_many_columns(
    store: txnkv.Client, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they do not name is not sent, and where their columns are is looked for once."""
    names = ["!", *(f"column {n}" for n in range(300))]
    schema = txnkv.Schema({"id": "int64", **dict.fromkeys(names, "int64?")}, primary_key=["id"])
    here = store.create_table("wide", schema)
    table, session = remote().table("wide"), remote().new_session()
    looked, places_of = list[Any](), answering.places_of
    monkeypatch.setattr(answering, "places_of", lambda *of: looked.append(of) or places_of(*of))
    named = [["!"], ["column 7", "!"], names, []]
    for id in range(100):
        session.upsert(table, {"id": id, **dict.fromkeys(named[id % 4], id)})
    (call,) = session.calls()
    few = [[row for row in rows if len(row) < 4] for _, _, _, rows in call.args[0]]
    assert len(pack(few)) < 75 * 40
    session.flush()
    assert len(looked) == 4
    given = [dict.fromkeys(named[id % 4], id) for id in range(100)]
    assert list(here.scan(ordered=True)) == [
        {"id": id, **dict.fromkeys(names), **row} for id, row in enumerate(given)
    ]


def test_an_alter_between_the_check_of_a_row_and_its_place_in_the_queue(
    store: txnkv.Client, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another thread: the row went on by the columns of after it."""
    here, client = store.create_table("t9", SCHEMA), remote()
    table, session = client.table("t9"), client.new_session()
    checked = RemoteTable.checked
    session.upsert(table, {"id": 0, "a": 5})

    def then_altered(self: RemoteTable, op: str, row: Any) -> Any:
        found = checked(self, op, row)
        monkeypatch.undo()
        table.alter(drop=["a"], rename={"b": "a"}, add={"b": "int64?"})
        return found

    monkeypatch.setattr(RemoteTable, "checked", then_altered)
    session.upsert(table, (1, 10, 20))
    session.upsert(table, (2, 30, 40))
    with pytest.raises(txnkv.RowErrors, match="was altered") as refused:
        session.flush()
    assert [each.key for each in refused.value.errors] == [0, 1]
    assert list(here.scan()) == [{"id": 2, "a": 30, "b": 40}]


def _run(client: txnkv.Client, table: txnkv.Table, row: Any, again: Any) -> None:
    tries: list[Any] = [row, again]
    client.run(lambda txn: txn.upsert(table, tries.pop(0)))
    assert not tries


def _flush(client: txnkv.Client, table: txnkv.Table, row: Any, again: Any) -> None:
    with client.new_session() as session:
        session.insert(table, row)
        with pytest.raises(txnkv.RowErrors, match="was altered") as refused:
            session.flush()
        assert [each.key for each in refused.value.errors] == [1]
        session.insert(table, again)


def _commit_async(client: txnkv.Client, table: txnkv.Table, row: Any, again: Any) -> None:
    txn = client.new_transaction()
    txn.insert(table, row)
    with pytest.raises(txnkv.SchemaChangedError):
        txn.commit_async().result()
    with client.transaction() as txn:
        txn.insert(table, again)
