"""Partitions that are added to a topic while a stream reads it; no Spark is started."""

from __future__ import annotations

import pytest

import txnkv

from .topic_tools import BUFFERS, ORDERS, Query, options, send, values

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("clients_are_closed")]


@BUFFERS
@ORDERS
def test_partitions_are_added_to_what_is_read(
    client: txnkv.Client, buffer: str, order: str
) -> None:
    """A running query has them with its next batch, from their beginning; so has one begun anew."""
    topic = client.create_topic("events", 2, buffer)
    send(client, "old")
    query = Query(options(client, order=order)).drain()
    now = Query(options(client, order=order))
    now.start().prepareForTriggerAvailableNow()
    topic.alter(partitions=4)
    send(client, "a", partition=3)
    send(client, "b")
    assert values(now.drain().rows()) == [b"old"]
    again = query.restarted()
    assert sorted(values(query.drain().rows())) == [b"a", b"b", b"old"]
    topic.alter(partitions=5)
    send(client, "c", partition=4)
    for each in (query, again):
        assert sorted(values(each.drain().rows())) == [b"a", b"b", b"c", b"old"]
        assert each.same_again()


def test_what_retention_took_of_a_new_partition(client: txnkv.Client) -> None:
    topic = client.create_topic("events", 1)
    send(client, "a")
    query = Query(options(client)).drain()
    careless = Query(options(client, failOnDataLoss="false"), list(query.offsets))
    topic.alter(partitions=2)
    send(client, "b", "c", partition=1)
    topic.truncate({1: 1})
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="retention took"):
        query.drain()
    assert values(careless.drain().rows()) == [b"c"]
