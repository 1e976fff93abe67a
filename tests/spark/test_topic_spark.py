"""Topics in Spark itself: that its planner, workers and checkpoints do what the other tests say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
import txnkv.spark
from tools.topic_writing import Writer

pytestmark = pytest.mark.spark

Batches = dict[int, list[tuple[int, int, bytes]]]


@pytest.fixture
def events(client: txnkv.Client) -> Writer:
    return Writer(client, "events", partitions=2)


@pytest.fixture
def run(spark: Any, client: txnkv.Client, tmp_path: Path) -> Callable[..., tuple[Batches, Any]]:
    """Runs a query until all that is there now is read; what each batch gave, and its progress."""

    def start(checkpoint: str = "checkpoint", **options: str) -> tuple[Batches, Any]:
        given: Batches = {}

        def keep(frame: Any, batch: int) -> None:
            rows = frame.select("partition", "offset", "value").collect()
            given[batch] = [(row[0], row[1], bytes(row[2])) for row in rows]

        stream = spark.readStream.format("txnkv").option("path", client.path)
        stream = stream.option("topic", "events").options(**options).load()
        query = (
            stream.writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(300)
        return given, query.lastProgress

    return start


def test_a_checkpoint_that_is_copied_back(
    run: Callable[..., tuple[Batches, Any]], events: Writer, tmp_path: Path
) -> None:
    """The batches after it are planned again, and give the same rows."""
    for i in range(4):
        events.small(f"a{i}", f"b{i}", number=i % 2)
    aborted = events.begin()
    events.append(aborted, "aborted")
    first, progress = run(maxOffsetsPerTrigger="4")
    assert [len(rows) for rows in first.values()] == [4, 4]
    assert txnkv.spark.lag(progress) == {0: 0, 1: 0}
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    events.abort(aborted)
    events.small("late")
    later, _ = run(maxOffsetsPerTrigger="100")
    assert [row[2] for row in later[2]] == [b"late"]
    for name in ("1", ".1.crc"):  # as when it died before its end was written
        (tmp_path / "copy" / "commits" / name).unlink()
    again, _ = run("copy", maxOffsetsPerTrigger="100")
    assert again[1] == first[1]
    assert again[2] == later[2]


def test_what_is_lost_stops_a_query(
    run: Callable[..., tuple[Batches, Any]], events: Writer, client: txnkv.Client
) -> None:
    from pyspark.errors import StreamingQueryException

    events.small("a")
    run()
    client.drop_topic("events")
    Writer(client, "events").small("b")
    with pytest.raises(StreamingQueryException, match=r"TopicNotFoundError.*was dropped"):
        run()
    with pytest.raises(StreamingQueryException, match="a streaming read of a topic has no option"):
        run("another", endingOffsets="latest")


def test_a_topic_in_a_batch(spark: Any, client: txnkv.Client, events: Writer) -> None:
    from pyspark.errors import AnalysisException

    with client.transaction() as txn:
        for i in range(100):
            txn.send("events", b"%d" % i, key=b"k%d" % (i % 7), headers=[("n", b"%d" % i)])

    def load(**more: str) -> Any:
        place = {"path": client.path, "topic": "events"} | more
        return spark.read.format("txnkv").options(**place).load()

    frame = load(order="commit")
    found = frame.selectExpr(
        "count(*)", "count(distinct key)", "sum(int(string(headers[0].value)))", "max(timestamp)"
    ).first()
    assert tuple(found)[:3] == (100, 7, 4950)
    assert frame.where("headers[0].key = 'n' AND txn_id IS NOT NULL").count() == 100
    assert load(columns="offset,partition").columns == ["offset", "partition"]
    for name, value, words in [
        ("topic", "nobody", "TopicNotFoundError"),
        ("columns", "nobody", "SchemaError"),
        ("startingOffsets", '{"5": 0}', "names partition 5"),
        ("maxOffsetsPerTrigger", "5", "a batch read of a topic has no option"),
    ]:
        with pytest.raises(AnalysisException, match=words):
            load(**{name: value}).collect()
