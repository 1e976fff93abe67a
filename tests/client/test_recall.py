"""Tables that are dropped and kept for a while, and brought back with all that was in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


@pytest.fixture
def filled(client: txnkv.Client) -> txnkv.Table:
    """A table with a row in row sets and one in memory."""
    table = client.create_table("orders", SCHEMA, txnkv.hash_partition("id", 2))
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": [1], "v": ["large"]}))
        txn.context.ensure_large()
    with client.transaction() as txn:
        txn.insert(table, (2, "small"))
    return table


def _rows(table: txnkv.Table) -> list[Any]:
    return [tuple(row.values()) for row in table.scan(ordered=True)]


ROWS = [(1, "large"), (2, "small")]


def test_a_kept_table_is_gone_until_it_is_recalled(
    client: txnkv.Client, filled: txnkv.Table
) -> None:
    client.drop_table(filled, keep=60.0)
    assert client.tables() == []
    with pytest.raises(txnkv.TableNotFoundError):
        client.table("orders")
    with pytest.raises(txnkv.TableNotFoundError, match="was dropped"):
        filled.count()
    with pytest.raises(txnkv.TableNotFoundError), client.transaction() as txn:
        txn.insert(filled, (3, None))
    recalled = client.recall_table("orders")
    assert recalled.info == filled.info
    assert _rows(recalled) == _rows(filled) == ROWS
    with client.transaction() as txn:
        txn.insert(filled, (3, None))
    assert recalled.count() == 3


def test_what_was_in_memory_is_flushed_meanwhile(
    connect: Callable[..., txnkv.Client], client: txnkv.Client, filled: txnkv.Table
) -> None:
    """A flush leaves out dropped tables: what it left out would be gone."""
    client.drop_table(filled, keep=60.0)
    client.create_table("other", SCHEMA)
    with client.transaction() as txn:
        txn.insert("other", (1, None))
    internals.flush(client)
    client.compact()
    client.close()
    again = connect()
    assert _rows(again.recall_table("orders")) == ROWS
    again.close()


def test_recalled_by_another_process(
    client: txnkv.Client, filled: txnkv.Table, process: Any
) -> None:
    client.drop_table(filled, keep=60.0)
    other = process(
        """
        table = client.recall_table("orders")
        with client.transaction() as txn:
            txn.insert(table, (3, "there"))
        say(table.count())
        """
    )
    assert other.finish() == 3
    assert filled.get(3) == {"id": 3, "v": "there"}


@pytest.mark.usefixtures("size")
def test_transactions_that_touched_it_are_aborted(
    client: txnkv.Client, filled: txnkv.Table
) -> None:
    txn = client.new_transaction()
    txn.insert(filled, (3, None))
    txn.flush()
    client.drop_table(filled, keep=60.0)
    with pytest.raises((txnkv.TableNotFoundError, txnkv.InvalidTxnStateError)):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED
    assert _rows(client.recall_table("orders")) == ROWS


def test_it_is_kept_for_its_time(
    client: txnkv.Client, filled: txnkv.Table, now: Any, by_hand: Any
) -> None:
    client.drop_table(filled, keep=60.0)
    now.forward(40)
    internals.tables(client).purge()
    assert _rows(client.recall_table("orders")) == ROWS
    client.drop_table(filled, keep=60.0)
    folders = [internals.store(client).directory.tablet_dir(id) for id in filled.info.tablets]
    assert any(folder.exists() for folder in folders)
    now.forward(61)
    internals.tables(client).purge()
    with pytest.raises(txnkv.TableNotFoundError, match="no dropped table 'orders' is kept"):
        client.recall_table("orders")
    assert not any(folder.exists() for folder in folders)


def test_only_what_was_kept_is_recalled(client: txnkv.Client, filled: txnkv.Table) -> None:
    with client.snapshot():  # it keeps the files, and no more
        client.drop_table(filled)
        with pytest.raises(txnkv.TableNotFoundError, match="kept are: none"):
            client.recall_table("orders")
    with pytest.raises(ValueError, match="keep is seconds"):
        client.drop_table("orders", keep=-1.0)


def test_the_name_may_be_given_again(client: txnkv.Client, filled: txnkv.Table) -> None:
    client.drop_table(filled, keep=60.0)
    second = client.create_table("orders", SCHEMA)
    with pytest.raises(txnkv.TableExistsError, match="given to another table"):
        client.recall_table("orders")
    client.drop_table(second, keep=60.0)
    assert client.recall_table("orders").info.id == second.info.id, "the one made last"
    client.drop_table(second)
    assert _rows(client.recall_table("orders")) == ROWS
