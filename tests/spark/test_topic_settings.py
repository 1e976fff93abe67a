"""Options of topics, changes and sinks: what makes no sense is refused before anything is read."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv.spark.settings import (
    CHANGES,
    TABLE,
    TOPIC,
    ChangesRead,
    Settings,
    StreamWrite,
    TopicRead,
    TopicWrite,
    what_is_read,
)
from txnkv.spark.source import TxnkvDataSource

pytestmark = pytest.mark.spark

TOPIC_AT = {"path": "/s", "topic": "e"}
TABLE_AT = {"path": "/s", "table": "t"}


def test_options_of_a_topic_are_taken() -> None:
    found = TopicRead.of_stream(
        TOPIC_AT
        | {
            "columns": "value, offset",
            "startingoffsets": '{"0": 5, "1": -2, "2": -1}',
            "MaxOffsetsPerTrigger": "1000",
            "order": "Commit",
            "failOnDataLoss": "FALSE",
        }
    )
    assert (found.path, found.topic, found.columns) == ("/s", "e", ("value", "offset"))
    assert found.starting_offsets == {0: 5, 1: -2, 2: -1}
    assert (found.max_offsets_per_trigger, found.order, found.fail_on_data_loss) == (
        1000,
        "commit",
        False,
    )


def test_the_defaults_of_a_topic() -> None:
    found = TopicRead.of_batch(TOPIC_AT)
    assert (found.starting_offsets, found.ending_offsets, found.order) == (
        "earliest",
        "latest",
        "offset",
    )
    assert (found.columns, found.max_offsets_per_trigger, found.fail_on_data_loss) == (
        None,
        None,
        True,
    )


def test_options_of_changes_are_taken() -> None:
    found = ChangesRead.of_stream(TABLE_AT | {"changes": "true", "history": "60"})
    assert (found.table, found.starting_offsets, found.history) == ("t", "earliest", 60.0)
    for text, expected in [
        ("latest", "latest"),
        ("123", txnkv.Timestamp(123)),
        ("2024-01-02T03:04:05+00:00", datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)),
    ]:
        assert (
            ChangesRead.of_stream(TABLE_AT | {"startingOffsets": text}).starting_offsets == expected
        )


def test_options_of_sinks_are_taken() -> None:
    given = {"appId": "daily", "timeout": "60", "checkpointLocation": "/c", "queryName": "q"}
    table = StreamWrite.of_stream(TABLE_AT | given | {"operation": "upsert"}, overwrite=False)
    assert (table.table, table.topic, table.operation) == ("t", None, "upsert")
    assert (table.app_id, table.timeout, table.checkpoint) == ("daily", 60.0, "/c")
    topic = StreamWrite.of_stream(TOPIC_AT)
    assert (topic.table, topic.topic, topic.app_id) == (None, "e", None)
    batch = TopicWrite.of_batch(TOPIC_AT | {"token": "x"})
    assert (batch.topic, batch.token, batch.timeout) == ("e", "x", None)


def test_a_checkpoint_names_one_place_wherever_it_is_given_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(given: str) -> str | None:
        return StreamWrite.of_stream(TABLE_AT | {"checkpointLocation": given}).checkpoint

    monkeypatch.chdir(tmp_path)
    assert found("c") == found("./d/../c") == found(str(tmp_path / "c")) == str(tmp_path / "c")
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    assert found("c") == str(tmp_path / "deep" / "c")
    assert found("hdfs://host/c") == "hdfs://host/c"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (TABLE_AT, TABLE),
        (TABLE_AT | {"changes": "false"}, TABLE),
        (TABLE_AT | {"CHANGES": "true"}, CHANGES),
        (TOPIC_AT, TOPIC),
    ],
)
def test_what_is_read(options: dict[str, str], kind: str) -> None:
    assert what_is_read(options) == kind


NOWHERE = {"path": "/s"}
READS: list[tuple[Any, dict[str, str], str]] = [
    (what_is_read, NOWHERE, "option table or topic is missing"),
    (what_is_read, TABLE_AT | TOPIC_AT, "exclude each other"),
    (what_is_read, TABLE_AT | {"changes": "yes"}, "option changes: 'true' or 'false'"),
    (TopicRead.of_batch, {"topic": "e"}, "option path is missing"),
    (TopicRead.of_batch, {"path": "/s", "topic": ""}, "option topic is missing"),
    (TopicRead.of_batch, TOPIC_AT | {"snapshot": "1"}, "topic has no option 'snapshot'"),
    (TopicRead.of_batch, TOPIC_AT | {"changes": "true"}, "topic has no option 'changes'"),
    (TopicRead.of_batch, TOPIC_AT | {"maxOffsetsPerTrigger": "1"}, "a batch read of a topic has"),
    (TopicRead.of_stream, TOPIC_AT | {"endingOffsets": "latest"}, "a streaming read of a topic"),
    (TopicRead.of_stream, TOPIC_AT | {"maxOffsetsPerTrigger": "0"}, "a whole number above 0"),
    (TopicRead.of_stream, TOPIC_AT | {"maxOffsetsPerTrigger": "many"}, "a whole number above 0"),
    (TopicRead.of_stream, TOPIC_AT | {"order": "time"}, "option order: 'offset' or 'commit'"),
    (TopicRead.of_stream, TOPIC_AT | {"failOnDataLoss": "no"}, "'true' or 'false'"),
    (TopicRead.of_stream, TOPIC_AT | {"startingOffsets": "first"}, "startingOffsets: 'earl"),
    (TopicRead.of_stream, TOPIC_AT | {"startingOffsets": "{}"}, "startingOffsets: 'earl"),
    (TopicRead.of_stream, TOPIC_AT | {"startingOffsets": "5"}, "startingOffsets: 'earl"),
    (TopicRead.of_stream, TOPIC_AT | {"startingOffsets": '{"0": -3}'}, "startingOffsets: 'earl"),
    (TopicRead.of_stream, TOPIC_AT | {"startingOffsets": '{"a": 1}'}, "startingOffsets: 'earl"),
    (TopicRead.of_stream, TOPIC_AT | {"startingOffsets": '{"0": 1.5}'}, "startingOffsets: 'earl"),
    (TopicRead.of_stream, TOPIC_AT | {"startingOffsets": '{"0": true}'}, "startingOffsets: 'earl"),
    (TopicRead.of_batch, TOPIC_AT | {"startingOffsets": "latest"}, "reads nothing"),
    (TopicRead.of_batch, TOPIC_AT | {"endingOffsets": "earliest"}, "endingOffsets: 'latest'"),
    (TopicRead.of_batch, TOPIC_AT | {"endingOffsets": '{"0": -2}'}, "endingOffsets: 'latest'"),
    (ChangesRead.of_stream, TABLE_AT | {"snapshot": "1"}, "changes has no option 'snapshot'"),
    (ChangesRead.of_stream, TABLE_AT | {"maxOffsetsPerTrigger": "1"}, "has no option"),
    (ChangesRead.of_stream, TABLE_AT | {"startingOffsets": "soon"}, "startingOffsets: of changes"),
    (ChangesRead.of_stream, TABLE_AT | {"history": "0"}, "option history: seconds, from"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "options", "words"), READS)
def test_options_of_reads_are_refused(settings: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(options)


@pytest.mark.parametrize("settings", [TopicRead.of_schema, TopicRead.of_batch, TopicRead.of_stream])
def test_a_topic_joins_no_transaction_to_be_read(settings: Any) -> None:
    with pytest.raises(txnkv.NotSupportedError, match="leave out option token"):
        settings(TOPIC_AT | {"token": "x"})
    with pytest.raises(txnkv.NotSupportedError, match="address of a server"):
        settings(TOPIC_AT | {"path": "hdfs://host/s"})


WRITES: list[tuple[Any, dict[str, str], str]] = [
    (TopicWrite.of_batch, TOPIC_AT | {"operation": "insert"}, "a write into a topic has no option"),
    (TopicWrite.of_batch, TOPIC_AT | {"appId": "a"}, "a write into a topic has no option 'appId'"),
    (TopicWrite.of_batch, TOPIC_AT | {"token": "x", "timeout": "1"}, "of its own"),
    (StreamWrite.of_stream, NOWHERE, "option table or topic is missing"),
    (StreamWrite.of_stream, TABLE_AT | TOPIC_AT, "exclude each other"),
    (StreamWrite.of_stream, TABLE_AT | {"token": "x"}, "a stream into a table has no option"),
    (StreamWrite.of_stream, TOPIC_AT | {"operation": "upsert"}, "a stream into a topic has no"),
    (StreamWrite.of_stream, TABLE_AT | {"operation": "merge"}, "operation: 'merge' is no op"),
    (StreamWrite.of_stream, TABLE_AT | {"appId": ""}, "option appId: an empty name"),
    (StreamWrite.of_stream, TABLE_AT | {"timeout": "-1"}, "option timeout: seconds"),
    (StreamWrite.of_stream, TABLE_AT | {"keepaliveTime": "x"}, "option keepaliveTime: seconds"),
    (
        StreamWrite.of_stream,
        TABLE_AT | {"operation": "insert", "operationColumn": "op"},
        "exclude each other",
    ),
]


@pytest.mark.parametrize(("settings", "options", "words"), WRITES)
def test_options_of_writes_are_refused(settings: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(options)


NONSENSE: list[tuple[Any, dict[str, str]]] = [
    *((Settings.of_write, TABLE_AT | {name: each}) for name in ("timeout", "keepaliveTime")
      for each in ("1e13", "1e300", "1e-9")),
    *((TopicRead.of_batch, TOPIC_AT | {"maxBytes": digits * "7"}) for digits in (30, 5000)),
    *((Settings.of_read, TABLE_AT | {"snapshot": each})
      for each in ("7" * 25, "7" * 5000, "2024-01-01")),
    *((TopicRead.of_batch, TOPIC_AT | {"startingOffsets": each})
      for each in ("[" * 3000, '{"00": 1}', '{"1_0": 1}', '{" 1": 1}', '{"0": 1, "0": 2}')),
    *((Settings.of_read, {"table": "t", "path": each}) for each in ("a\0b", "a" * 4000)),
    (Settings.of_write, TABLE_AT | {"operation": "Insert"}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "options"), NONSENSE)
def test_what_makes_no_sense_is_told_with_the_options_name(
    settings: Any, options: dict[str, str]
) -> None:
    """Some were Python's own errors, and some were taken for what they are not."""
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"^option {name}: ") as caught:
        settings(options)
    assert len(str(caught.value)) < 400


def test_the_largest_numbers() -> None:
    assert Settings.of_write(TABLE_AT | {"timeout": "1e12"}).timeout == 1e12
    assert TopicRead.of_batch(TOPIC_AT | {"maxBytes": str(2**63 - 1)}).max_bytes == 2**63 - 1


@pytest.mark.parametrize("settings", [TopicWrite.of_batch, StreamWrite.of_stream])
def test_a_topic_is_not_overwritten(settings: Any) -> None:
    with pytest.raises(ValueError, match="a topic is only ever added to"):
        settings(TOPIC_AT, overwrite=True)


def test_overwriting_a_table_leaves_nothing_to_delete() -> None:
    with pytest.raises(ValueError, match="leaves no rows to delete"):
        StreamWrite.of_stream(TABLE_AT | {"operation": "delete"}, overwrite=True)


def test_what_is_there_is_looked_for_at_once(client: txnkv.Client) -> None:
    client.create_topic("e")
    place = {"path": client.path, "topic": "e"}
    for options, error, words in [
        (place | {"path": "/no/such"}, txnkv.StoreNotFoundError, "/no/such"),
        (place | {"topic": "nobody"}, txnkv.TopicNotFoundError, "nobody"),
        (place | {"columns": "value,nobody"}, txnkv.SchemaError, "no column 'nobody'"),
    ]:
        with pytest.raises(error, match=words):
            TxnkvDataSource(options).schema()


def test_a_schema_of_the_callers_must_fit_the_topic(client: txnkv.Client) -> None:
    from pyspark.sql.types import LongType, StringType, StructType

    client.create_topic("e")
    source = TxnkvDataSource({"path": client.path, "topic": "e"})
    with pytest.raises(txnkv.SchemaError, match="column 'value' of topic 'e' is binary"):
        source.reader(StructType().add("value", StringType()))
    with pytest.raises(txnkv.SchemaError, match="not null"):
        source.streamReader(StructType().add("txn_id", LongType(), False))
    assert source.reader(StructType().add("offset", LongType())) is not None


def test_a_stream_is_of_a_topic_or_of_changes(client: txnkv.Client, table: txnkv.Table) -> None:
    place = {"path": client.path, "table": "t"}
    source = TxnkvDataSource(place)
    with pytest.raises(txnkv.NotSupportedError, match=r"\.option\('changes', 'true'\)"):
        source.streamReader(source.schema())
    with pytest.raises(txnkv.NotSupportedError, match="changes are read by"):
        TxnkvDataSource(place | {"changes": "true"}).reader(source.schema())
