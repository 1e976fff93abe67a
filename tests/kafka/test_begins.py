"""AddPartitionsToTxn: a transaction's row, partitions and name become durable with one sync."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.kafka.test_requests import _add, _begin, _end, _send
from tools.bounces.server import Serving
from tools.kafka_wire import Wire, batch_of
from txnkv.coordinator import PARTITION, status_table
from txnkv.kafka import KafkaServer
from txnkv.kafka.api_tables import Code
from txnkv.storage.faults import arm, disarm

Serve = Callable[..., KafkaServer]
Dial = Callable[[KafkaServer], Wire]


@contextmanager
def _dialled(serving: Serving) -> Iterator[Wire]:
    wire = Wire(serving.port)
    with wire.socket:
        yield wire


def committed(store: txnkv.Client) -> list[bytes | None]:
    return [message.value for message in store.topic("t").consumer().poll(timeout=0)]


@pytest.mark.parametrize("steps", [("log.written",), ("log.durable",), ("log.written",) * 3])
def test_a_server_that_dies_as_a_transaction_begins(
    store: txnkv.Client, store_path: Path, steps: tuple[str, ...], monkeypatch: Any
) -> None:
    """Its producer asks the next one again, and finds one transaction: its own."""
    store.create_topic("t")
    serving = Serving(store_path)
    serving.start()
    with _dialled(serving) as wire:
        who = _begin(wire)
    serving.end(signal.SIGKILL)
    for step in steps:
        monkeypatch.setenv("TXNKV_FAULT", f"{step}=kill@1")
        serving.start()
        with _dialled(serving) as wire, pytest.raises((EOFError, ConnectionError)):
            _add(wire, who)
        serving.end(signal.SIGKILL)
    monkeypatch.delenv("TXNKV_FAULT")
    serving.start()
    with _dialled(serving) as wire:
        assert _add(wire, who) == 0
        assert _send(wire, who, 0, b"a", b"b")["base_offset"] == 0
        assert committed(store) == []
        assert _end(wire, who, commit=True) == 0
        assert committed(store) == [b"a", b"b"]
        assert wire.produce("t", batch_of(b"c"))["base_offset"] == 3
        assert committed(store) == [b"a", b"b", b"c"]
    serving.end(signal.SIGKILL)


def test_partitions_take_part_from_the_begin(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t", partitions=3)
    who = _begin(wire)
    syncs: list[str] = []
    arm("status.unsynced", lambda: syncs.append(threading.current_thread().name))
    told = [{"name": "t", "partitions": [0, 2]}]
    (answer,) = wire.ask("AddPartitionsToTxn", **who, topics=told)["results_by_topic"]
    assert [each["partition_error_code"] for each in answer["results_by_partition"]] == [0, 0]
    disarm("status.unsynced")
    assert syncs.count("txnkv-kafka-client") == 1
    with internals.status(store).read() as cur:
        (row,) = status_table.live(cur)
        ids = status_table.participants(cur, row.txn_id)[PARTITION]
    assert ids == [topic.info.partitions[0], topic.info.partitions[2]]


def test_a_transaction_begins_again_and_again(store: txnkv.Client, wire: Wire) -> None:
    """The row of the name is known from the transaction before, committed or aborted."""
    store.create_topic("t")
    who = _begin(wire)
    for number in range(6):
        assert _add(wire, who) == 0
        assert _send(wire, who, number, b"%d" % number)["error_code"] == 0
        assert _end(wire, who, commit=number % 3 != 2) == 0
    assert committed(store) == [b"0", b"1", b"3", b"4"]


def test_a_name_that_another_server_has_taken(
    store: txnkv.Client, serve: Serve, dial: Dial
) -> None:
    """The row is not as it was: the producer is fenced, and what it began is gone."""
    store.create_topic("t")
    one, two = dial(serve()), dial(serve())
    who = _begin(one)
    assert (_add(one, who), _send(one, who, 0, b"a")["error_code"]) == (0, 0)
    assert _end(one, who, commit=True) == 0
    later = _begin(two)
    assert later["producer_epoch"] == who["producer_epoch"] + 1
    assert _add(one, who) == Code.PRODUCER_FENCED
    assert _add(two, later) == 0
    assert _send(two, later, 0, b"b")["error_code"] == 0
    assert _end(two, later, commit=True) == 0
    assert committed(store) == [b"a", b"b"]
    with internals.status(store).read() as cur:
        assert list(status_table.live(cur)) == []


def test_a_name_that_a_program_of_the_store_has_used(
    store: txnkv.Client, server: KafkaServer, wire: Wire
) -> None:
    """Between two transactions of a Kafka producer, which has not heard of it."""
    store.create_topic("t")
    who = _begin(wire)
    assert (_add(wire, who), _end(wire, who, commit=True)) == (0, 0)
    with store.transaction(name="x") as txn:
        txn.send("t", b"between")
    assert _add(wire, who) == Code.PRODUCER_FENCED
    assert committed(store) == [b"between"]
