"""A job over a topic of either buffer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import txnkv
from txnkv.storage.faults import disarm
from txnkv.transaction.job import Job


@pytest.fixture(params=["marker", "sidecar"])
def topic(request: pytest.FixtureRequest, client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic("events", partitions=2, buffer=request.param)


@pytest.fixture
def txn(client: txnkv.Client, topic: txnkv.Topic) -> txnkv.Transaction:
    return client.new_transaction(timeout=None)


@pytest.fixture
def job(txn: txnkv.Transaction) -> Job:
    return Job.start(txn)


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    disarm()
