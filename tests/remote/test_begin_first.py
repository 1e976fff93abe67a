"""A transaction over a server begins before whatever its client reads, also by a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv


def scanned(_: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    scan = table.scan(where=[("id", "=", 1)])
    return lambda: scan.to_arrow().num_rows


def by_token(client: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    (token,) = table.scan().tokens()
    return lambda: token.open(client).to_arrow().num_rows


def diffed(_: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    return lambda: table.diff(0).read_all().num_rows


def diffed_by_token(client: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    (token,) = table.diff_tokens(0)
    return lambda: token.open(client).read_all().num_rows


@pytest.mark.parametrize("prepared", [scanned, by_token, diffed, diffed_by_token])
def test_what_is_read_after_the_begin_is_not_overwritten(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], prepared: Any
) -> None:
    """What a scan that was made before had read, or a diff, another had changed meanwhile."""
    client = remote()
    table = client.table("t")
    table.insert((1, "10"))
    read = prepared(client, table)
    txn = client.new_transaction()
    assert read() == 1
    store.table("t").update((1, "110"))
    txn.update(table, (1, "11"))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    assert table.get(1) == {"id": 1, "v": "110"}
