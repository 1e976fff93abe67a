"""A bank: money moves between accounts, and none may come or go.

    open_bank(client)
    transfer(client, id, random, ...)   one transaction; False when it found no money to move
    problems(snapshot)                  what an audit at one instant finds

A transfer changes two balances or more, and adds its row for each to `transfers`, all in one
transaction: so a balance is at each instant what the transfers of that instant make of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Final

import pyarrow as pa

import txnkv
from txnkv.transaction import Isolation

__all__ = ["ACCOUNTS", "START", "open_bank", "problems", "transfer", "transfer_ids"]

ACCOUNTS: Final = 24
START: Final = 1000
"""The money in each account at the beginning."""

_ACCOUNTS: Final = txnkv.Schema({"id": "int64", "balance": "int64"}, primary_key=["id"])
_TRANSFERS: Final = txnkv.Schema(
    {"id": "int64", "account": "int64", "change": "int64"}, primary_key=["id", "account"]
)
_ACCOUNTS_ARROW: Final = pa.schema([("id", pa.int64()), ("balance", pa.int64())])
_TRANSFERS_ARROW: Final = pa.schema(
    [("id", pa.int64()), ("account", pa.int64()), ("change", pa.int64())]
)


def open_bank(client: txnkv.Client) -> None:
    """Make the tables and the accounts."""
    client.create_table("accounts", _ACCOUNTS, txnkv.hash_partition("id", 3))
    client.create_table("transfers", _TRANSFERS, txnkv.hash_partition("id", 2))
    rows = pa.table([range(ACCOUNTS), [START] * ACCOUNTS], schema=_ACCOUNTS_ARROW)
    with client.transaction() as txn:
        txn.write("accounts", rows)


def transfer(client: txnkv.Client, id: int, chance: Random, isolation: Isolation) -> bool:
    """Move money, by `client.run`; a few transfers are large ones, of many accounts by batch.

    Returns:
        Whether it is committed.

    Raises:
        TxnkvError: it did not come through, or nobody knows.
    """
    large = chance.random() < 0.1
    accounts = chance.sample(range(ACCOUNTS), 8 if large else 2)
    amount = chance.randint(1, 20)

    def move(txn: txnkv.Transaction) -> bool:
        if large:
            return _move_by_batch(txn, id, accounts, amount)
        return _move_by_row(txn, id, accounts[0], accounts[1], amount)

    return client.run(move, attempts=100, isolation=isolation)


def _move_by_row(txn: txnkv.Transaction, id: int, source: int, target: int, amount: int) -> bool:
    giver, taker = txn.get("accounts", source), txn.get("accounts", target)
    assert giver is not None
    assert taker is not None
    if giver["balance"] < amount:
        return False
    txn.update("accounts", {"id": source, "balance": giver["balance"] - amount})
    txn.insert("transfers", (id, source, -amount))
    txn.insert("transfers", (id, target, amount))
    txn.upsert("accounts", {"id": target, "balance": taker["balance"] + amount})
    return True


def _move_by_batch(txn: txnkv.Transaction, id: int, accounts: list[int], amount: int) -> bool:
    """The first gives `amount` to each of the others, as a bulk load that is staged."""
    txn.context.ensure_large()
    balances: list[int] = txn.get_many("accounts", accounts)["balance"].to_pylist()
    changes = [-amount * (len(accounts) - 1)] + [amount] * (len(accounts) - 1)
    after = [balance + change for balance, change in zip(balances, changes, strict=True)]
    if after[0] < 0:
        return False
    txn.write("accounts", pa.table([accounts, after], schema=_ACCOUNTS_ARROW), "update")
    ids = [id] * len(accounts)
    txn.write("transfers", pa.table([ids, accounts, changes], schema=_TRANSFERS_ARROW))
    return True


def transfer_ids(snapshot: txnkv.Snapshot) -> set[int]:
    """Those that are there."""
    return set(snapshot.scan("transfers", ["id"]).to_arrow()["id"].to_pylist())


def problems(snapshot: txnkv.Snapshot) -> Iterator[str]:
    """Whatever is not as it should be, in words."""
    accounts = snapshot.scan("accounts").to_arrow()
    transfers = snapshot.scan("transfers").to_arrow()
    balances = dict(zip(*_columns(accounts, "id", "balance"), strict=True))
    if sorted(balances) != list(range(ACCOUNTS)) or accounts.num_rows != ACCOUNTS:
        yield f"accounts {sorted(_columns(accounts, 'id')[0])} are not those that were made"
    if sum(balances.values()) != ACCOUNTS * START:
        yield f"the sum is {sum(balances.values())}, not {ACCOUNTS * START}"
    moved = _sums(transfers, "account")
    for account, balance in balances.items():
        expected = START + moved.get(account, 0)
        if balance != expected:
            yield f"account {account} has {balance}, by its transfers {expected}"
    for id, total in _sums(transfers, "id").items():
        if total != 0:
            yield f"transfer {id} makes {total}: a part of it is not there"


def _columns(table: pa.Table, *names: str) -> list[list[int]]:
    return [table[name].to_pylist() for name in names]


def _sums(transfers: pa.Table, by: str) -> dict[int, Any]:
    summed = transfers.group_by(by).aggregate([("change", "sum")])
    return dict(zip(*_columns(summed, by, "change_sum"), strict=True))
