"""The catalog of topics: made, found, refused, dropped and copied."""

from __future__ import annotations

import math
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.topic_contents import values
from tools.topic_writers import begin, create, send, small
from txnkv.errors import (
    NotSupportedError,
    TopicExistsError,
    TopicNotFoundError,
)
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import append, roll_forward


def test_topics_are_made_found_and_dropped(client: txnkv.Client) -> None:
    engine = internals.topics(client)
    made = engine.create("events", 3, "sidecar", TopicOptions(compression="lz4"))
    assert engine.get("events") == made
    assert len(made.partitions) == 3
    with pytest.raises(TopicExistsError, match="'events' already"):
        engine.create("events", 1, "marker", TopicOptions())
    engine.create("others", 1, "marker", TopicOptions())
    assert engine.names() == ["events", "others"]
    assert engine.drop("events")
    assert not engine.drop("events")
    assert engine.find("events") is None
    with pytest.raises(TopicNotFoundError, match="the topics are: others"):
        engine.get("events")
    with pytest.raises(TopicNotFoundError, match="dropped"):
        engine.require_live(made)
    again = engine.create("events", 1, "marker", TopicOptions())
    assert not set(again.partitions) & set(made.partitions)


@pytest.mark.parametrize(
    ("partitions", "buffer"), [(0, "marker"), (1025, "marker"), (1, "other"), ("2", "marker")]
)
def test_arguments_that_make_no_sense(client: txnkv.Client, partitions: Any, buffer: str) -> None:
    with pytest.raises(ValueError, match=r"partitions|buffer"):
        internals.topics(client).create("t", partitions, buffer, TopicOptions())


@pytest.mark.parametrize(
    "options",
    [{"compression": "gzip"}, {"retention_seconds": -1}, {"segment_bytes": 0},
     {"max_message_bytes": -1}],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TopicOptions(**options)


def test_false_that_was_let_pass_is_0_still() -> None:
    """Stores have it, and their topics are to open."""
    text = TopicOptions(retention_seconds=0, tombstone_seconds=7).to_json()
    text = text.replace('"retention_seconds": 0', '"retention_seconds": false')
    made = TopicOptions.from_json(text)
    assert (made.retention_seconds, made.tombstone_seconds) == (0, 7)
    assert made.retention_seconds is not False


def test_a_dropped_topic_takes_no_messages(client: txnkv.Client) -> None:
    engine = internals.topics(client)
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    engine.drop("events")
    assert client.transaction_state(row.txn_id) is txnkv.TxnState.ABORTED
    late = begin(client)
    with pytest.raises(TopicNotFoundError):
        send(client, late, partition, [b"b"])
    with pytest.raises(TopicNotFoundError):
        append.append_alone(engine, partition, [])
    with pytest.raises(TopicNotFoundError):
        small(client, [partition], [b"c"])


def test_files_of_a_dropped_topic_go_once_nobody_reads_them(client: txnkv.Client) -> None:
    engine, directory = internals.topics(client), internals.store(client).directory
    (partition,) = create(client)
    small(client, [partition], [b"a"])
    roll_forward.complete(engine, partition)
    with client.snapshot():
        engine.drop("events")
        assert directory.log_dir(partition.id).exists()
    engine.create("other", 1, "marker", TopicOptions())
    engine.drop("other")  # purges what can go
    assert not directory.log_dir(partition.id).exists()
    assert engine.partition(partition.id) is None


def test_messages_of_a_dropped_topic_do_not_stop_the_flush(client: txnkv.Client) -> None:
    engine = internals.topics(client)
    (dropped,) = create(client, "dropped")
    (kept,) = create(client, "kept")
    small(client, [dropped, kept], [b"a"])
    engine.drop("dropped")
    internals.flush(client)
    assert engine.tail.partition_ids == []
    assert values(client, "kept") == [b"a"]


def test_a_copy_of_a_topic_takes_no_messages(client: txnkv.Client) -> None:
    engine = internals.topics(client)
    topic = engine.create("copy", 1, "marker", TopicOptions(replica_of="elsewhere"))
    (partition,) = engine.partitions(topic)
    row = begin(client)
    for buffered in (
        lambda: send(client, row, partition, [b"a"]),
        lambda: engine.require_writable(topic),
    ):
        with pytest.raises(NotSupportedError, match="copy of a topic of store elsewhere"):
            buffered()


def test_numbers_of_bytes_are_integers() -> None:
    """They are told to Kafka's clients, which read 64 bits."""
    given: Any = {"retention_bytes": math.inf, "segment_bytes": 2.5, "max_message_bytes": 2**70}
    made = TopicOptions(**given)
    told = (made.retention_bytes, made.segment_bytes, made.max_message_bytes)
    assert told == (1 << 62, 2, 1 << 62)
    assert [type(each) for each in told] == [int] * 3
