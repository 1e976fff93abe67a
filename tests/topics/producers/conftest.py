"""A topic, and producers of it that are closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.producers.producer_tools import TOPIC, Make
from txnkv.client.producer import Producer
from txnkv.errors import (
    ProducerFencedError,
)
from txnkv.storage import disarm
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions


@pytest.fixture
def topic(client: txnkv.Client) -> TopicInfo:
    return internals.topics(client).create(TOPIC, 1, "marker", TopicOptions())


@pytest.fixture
def make(client: txnkv.Client, topic: TopicInfo) -> Iterator[Make]:
    """Makes producers of the topic, closed at the end."""
    made: list[Producer] = []

    def make_one(name: str | None = "billing", **options: Any) -> Producer:
        made.append(Producer(client, internals.topics(client).get(TOPIC), name, **options))
        return made[-1]

    yield make_one
    disarm()
    for producer in made:
        try:
            producer.close()
        except ProducerFencedError:
            assert producer is not made[-1]
