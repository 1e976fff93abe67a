"""Transactions that are open when a server hears of them: taken over where all is known of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.kafka.test_requests import _add, _begin, _commit_offset, _end, _offset, _send
from tools.kafka_wire import Wire, batch_of
from txnkv.kafka import KafkaServer
from txnkv.kafka.api_tables import Code

Serve = Callable[..., KafkaServer]
Dial = Callable[[KafkaServer], Wire]


def left_open(store: txnkv.Client, serve: Serve, dial: Dial) -> dict[str, Any]:
    """Begin a transaction at a server that goes, with one batch."""
    store.create_topic("t")
    first = serve()
    wire = dial(first)
    who = _begin(wire)
    assert _add(wire, who) == 0
    assert _send(wire, who, 0, b"a")["error_code"] == 0
    first.close()
    return who


def assert_fenced(wire: Wire, who: dict[str, Any]) -> None:
    assert _send(wire, who, 1, b"b")["error_code"] == Code.INVALID_PRODUCER_EPOCH
    assert _end(wire, who, commit=True) == Code.PRODUCER_FENCED


def test_it_goes_on_at_the_next_server(store: txnkv.Client, serve: Serve, dial: Dial) -> None:
    who = left_open(store, serve, dial)
    wire = dial(serve())
    assert _send(wire, who, 1, b"b")["error_code"] == 0
    assert _end(wire, who, commit=True) == 0
    assert [m.value for m in store.topic("t").consumer().poll(timeout=0)] == [b"a", b"b"]


def test_one_from_before_the_machine_was_started_is_given_up(
    store: txnkv.Client, serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log may lack batches of it, or have some that status.db does not know of."""
    who = left_open(store, serve, dial)
    monkeypatch.setattr("txnkv.kafka.transactional_ids.boot_id", lambda: "another")
    assert_fenced(dial(serve()), who)


def test_one_that_another_server_serves_is_given_up(
    store: txnkv.Client, serve: Serve, dial: Dial, process: Callable[..., Any]
) -> None:
    """Each of the two would count the batches by itself."""
    who = left_open(store, serve, dial)
    other = process("say(client.instance.store.runtime.owner)\nwait()\n")
    owner = other.hear()
    with internals.status(store).write() as cur:
        cur.execute(
            "UPDATE transactions SET owner_slot = ?, owner_start = ? WHERE state = ?",
            (*owner, int(txnkv.TxnState.OPEN)),
        )
    assert_fenced(dial(serve()), who)
    other.tell()
    other.finish()


def test_an_epoch_that_nobody_was_given_is_fenced(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t")
    who = _begin(wire)
    assert _add(wire, who) == 0
    assert_fenced(wire, who | {"producer_epoch": who["producer_epoch"] + 1})


def test_offsets_that_are_open_are_known_whatever_the_clock_says(
    store: txnkv.Client, serve: Serve, dial: Dial
) -> None:
    """It was an hour fast at the commit before; the next server told offset 4 to be stable."""
    store.create_topic("t")
    server = serve()
    wire = dial(server)
    who = _begin(wire)
    for offset in (4, 5):
        assert wire.ask("AddOffsetsToTxn", **who, group_id="g")["error_code"] == 0
        assert _commit_offset(wire, who, offset) == 0
        if offset == 4:
            assert _end(wire, who, commit=True) == 0
            (row,) = store.table("kafka_offsets").scan()
            row["committed"] += timedelta(hours=1)
            store.run(lambda txn, row=row: txn.upsert("kafka_offsets", row))
    server.close()
    wire = dial(serve())
    assert _offset(wire) == (-1, Code.UNSTABLE_OFFSET_COMMIT)
    assert _end(wire, who, commit=True) == 0
    assert _offset(wire) == (5, 0)


def test_a_producer_of_transactions_sends_nothing_beside_them(
    store: txnkv.Client, wire: Wire
) -> None:
    """One that was fenced could: the epoch of such a batch is another one."""
    topic = store.create_topic("t")
    who = _begin(wire)
    assert _add(wire, who) == 0
    batch = batch_of(b"a", producer=(who["producer_id"], who["producer_epoch"]), first=0)
    for _ in range(2):
        refused = wire.produce("t", batch, transactional_id=who["transactional_id"])
        assert refused["error_code"] == Code.INVALID_TXN_STATE
        _begin(wire)  # the successor
    assert topic.end_offsets() == {0: 1}  # the marker
