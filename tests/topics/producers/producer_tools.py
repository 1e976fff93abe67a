"""Senders and batches of the tests of producers."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

import txnkv
from tests import internals
from txnkv.client.producer import Producer
from txnkv.topics.write import producers
from txnkv.topics.write.producer_sender import Delivered, Sender

TOPIC = "events"


Make = Callable[..., Producer]


def sender(client: txnkv.Client, name: str | None = "billing", patience: float = 20.0) -> Sender:
    return Sender(internals.topics(client), internals.topics(client).get(TOPIC), name, patience)


def batch(*texts: str) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([text.encode() for text in texts], pa.binary())})


def deliver(by: Sender, *texts: str, number: int = 0) -> Delivered:
    return by.deliver([(number, batch(*texts))])[0]


def sequences(by: Sender) -> dict[int, int]:
    return dict(by._next)


def back_to(by: Sender, numbers: dict[int, int]) -> None:
    """Set sequence numbers back, as if the answer of what was sent since had been lost."""
    by._next = dict(numbers)


# -- what is kept ----------------------------------------------------------------------


def rows(client: txnkv.Client) -> tuple[int, int]:
    with internals.status(client).read() as cur:
        (names,) = cur.execute("SELECT count(*) FROM producers").fetchone() or (0,)
        (states,) = cur.execute("SELECT count(*) FROM producer_states").fetchone() or (0,)
    return int(str(names)), int(str(states))


def sweep(client: txnkv.Client) -> int:
    lease = internals.maintenance(client).lease
    assert lease.acquire()
    return producers.forget_idle(internals.store(client), lease)
