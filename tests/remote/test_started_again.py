"""Transactions over a server that is started again while they wait, or before they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests.remote.conftest import Serving
from txnkv.transaction import Job

Txn = txnkv.Transaction
Use = Callable[[txnkv.Client, Txn, int], Any]


def again(serving: Serving) -> None:
    serving.kill()
    serving.start()


def flush(_: txnkv.Client, txn: Txn, __: int) -> None:
    txn.flush()


def handed_to_spark(_: txnkv.Client, txn: Txn, __: int) -> None:
    pytest.importorskip("pyspark")
    import txnkv.spark

    assert txnkv.spark.options(txn, table="t")["path"].startswith("grpc")


def commit(_: txnkv.Client, txn: Txn, __: int) -> None:
    txn.commit()


def a_row(client: txnkv.Client, txn: Txn, key: int) -> None:
    assert txn.state is txnkv.TxnState.OPEN
    txn.insert("t", (key, "own"))
    commit(client, txn, key)


def by_a_job(client: txnkv.Client, txn: Txn, key: int) -> None:
    job = Job.start(txn)
    with job.session("0") as session:
        session.insert("t", (key, "own"))
    job.commit(["0"])
    commit(client, txn, key)


HELD: list[tuple[Use, Use]] = [
    (flush, commit),
    (handed_to_spark, commit),
    (flush, lambda client, txn, key: (flush(client, txn, key), commit(client, txn, key))),
    (flush, a_row),
    (lambda _, txn, __: txn.new_session(), commit),
    (flush, by_a_job),
]
GIVEN: list[tuple[Use, Use]] = [
    (lambda _, txn, key: txn.insert("t", (key, "a")), commit),
    (lambda _, txn, key: (txn.send("events", b"a"), txn.get("t", key)), commit),
    (lambda _, txn, key: (txn.send("events", b"a"), txn.get("t", key)), by_a_job),
    (lambda client, txn, _: client.table("t").restore(client.snapshot().timestamp, txn), commit),
]


@pytest.mark.parametrize("cases", [HELD, GIVEN], ids=["held", "given"])
def test_a_transaction_that_others_know_of_is_joined_again_unless_it_was_given_something(
    serving: Serving, store: txnkv.Client, cases: list[tuple[Use, Use]]
) -> None:
    """By whom holds it: what others wrote in it is committed."""
    serving.start()
    with txnkv.connect(serving.address) as client:
        txns = [client.new_transaction(timeout=None) for _ in cases]
        for key, (txn, (before, _)) in enumerate(zip(txns, cases, strict=True)):
            with Txn.deserialize(store, txn.serialize()) as joined:
                joined.insert("t", (key, "of another"))
            before(client, txn, 100 + key)
        again(serving)
        for key, (txn, (_, after)) in enumerate(zip(txns, cases, strict=True)):
            if cases is HELD:
                after(client, txn, 100 + key)
                continue
            with pytest.raises(txnkv.UnavailableError, match="begin again"):
                after(client, txn, 100 + key)
            txn.rollback()
    rows = store.table("t").scan().to_arrow()["v"].to_pylist()
    assert rows == (["of another"] * len(HELD) + ["own"] * 2 if cases is HELD else [])
