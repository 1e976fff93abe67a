"""Tables of many small blocks and row sets, without many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests.tables.people import SCHEMA, batch
from txnkv.tables import arrow_input
from txnkv.tables.tablets import row_set_writer


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 5 rows, chunks of 23: a write of 100 rows makes 5 row sets of 5 blocks."""
    monkeypatch.setattr(row_set_writer, "rows_per_block", lambda widths: 5)
    monkeypatch.setattr(arrow_input, "CHUNK_ROWS", 23)


@pytest.fixture
def put(client: txnkv.Client, large: None) -> Callable[..., Any]:
    """Commits data into a table, each time as a row set of its own; answers the timestamp."""

    def run(table: txnkv.Table, data: Any) -> Any:
        with client.transaction() as txn:
            if isinstance(data, list):
                for row in data:
                    txn.insert(table, row)
            else:
                txn.write(table, data)
        return txn.commit()

    return run


@pytest.fixture
def people(client: txnkv.Client) -> txnkv.Table:
    """Two tablets, 40 rows; every fourth has no mail."""
    table = client.create_table("people", SCHEMA, txnkv.hash_partition("id", 2))
    with client.transaction() as txn:
        txn.write(table, batch(range(40)))
    return table


@pytest.fixture
def unique(client: txnkv.Client, people: txnkv.Table) -> txnkv.Table:
    """The same with a unique index by mail, and one by n."""
    client.create_index(people, "mail", unique=True)
    client.create_index(people, ["n"])
    return people


@pytest.fixture(autouse=True)
def always_calm(calm: None) -> None:
    """See `calm`."""
