"""The cost of a trigger that has next to nothing to do, by the number of partitions.

A query waits; a step makes one message in each partition (or none, but an aborted transaction
that moves the offsets), and is over when the query has done it. The time is Spark's for that
trigger: asking for offsets, planning, tasks, the commits of sink and checkpoint. Rows go to
Spark's own sink that does nothing where no other is named; one in Python costs more, also when it
does nothing.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame

import txnkv
from benchmarks.harness import MILLISECONDS, Line, compare
from benchmarks.kafka import Broker
from benchmarks.svg import Series, chart

from . import kafka
from .nothing import FORMAT, advance, save
from .queries import batches
from .setting import Setting

PLOT = "streaming-trigger.svg"
_SIZES = [1, 2, 4, 8, 16, 32, 64]
_ROUNDS = 3
"""At most: a query takes seconds to start, and its first trigger is not counted anyway."""
_SINK = txnkv.Schema({"partition": "int32", "offset": "int64"}, primary_key=["partition", "offset"])


@dataclass
class _Stepper:
    """A query that is made to do one trigger after the other.

    Attributes:
        step: gives it something to do.
        stream: what it reads.
        sink: the format of what it writes, and its options.
    """

    name: str
    stream: Callable[[], DataFrame]
    step: Callable[[], None]
    sink: str
    options: dict[str, str] = field(default_factory=dict)


def trigger(setting: Setting) -> list[Line]:
    """Triggers of a message a partition and of none, on 1 to 64 partitions."""
    lines: list[Line] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for partitions in [2] if setting.tiny else _SIZES:
        found = _at(setting, partitions)
        for line in found:
            points.setdefault(line.name, []).append((partitions, 1e3 / line.rate))
        lines += found
    if setting.plots is not None:
        setting.plots.mkdir(parents=True, exist_ok=True)
        series = [Series(name, some) for name, some in points.items()]
        text = chart("one trigger, a message a partition", "partitions", "ms, median", series)
        (setting.plots / PLOT).write_text(text)
    return lines


def _at(setting: Setting, partitions: int) -> list[Line]:
    with ExitStack() as stack:
        client = stack.enter_context(closing(setting.connect(f"trigger-{partitions}")))
        steppers = _steppers(setting, client, partitions)
        if setting.broker is not None:
            steppers.append(_kafka(setting, setting.broker, partitions, stack))
        rates: dict[str, list[float]] = {one.name: [] for one in steppers}
        for _ in range(min(setting.rounds, _ROUNDS)):
            for one in steppers:
                rates[one.name].append(1 / _seconds(setting, one, setting.size(1, 10)))
    noun = "partition" if partitions == 1 else "partitions"
    return compare(f"a trigger, {partitions} {noun}", rates, unit=MILLISECONDS)


def _steppers(setting: Setting, client: txnkv.Client, partitions: int) -> list[_Stepper]:
    topic = client.create_topic("messages", partitions=partitions)
    client.create_table("seen", _SINK)
    numbers = pa.array(range(partitions), pa.int32())
    batch = pa.table({"value": pa.array([b"x" * 100] * partitions), "partition": numbers})
    counter = setting.base / f"counter-{partitions}"
    sample = save(
        pa.record_batch({"partition": numbers, "offset": pa.array([0] * partitions, pa.int64())}),
        setting.base / f"sample-{partitions}.arrow",
    )
    there = 0

    def send() -> None:
        with client.transaction() as txn:
            txn.send_batch(topic, batch)

    def send_nothing() -> None:
        txn = client.new_transaction()
        txn.serialize()  # large: batches of its own in the log, and a marker
        txn.send_batch(topic, batch)
        txn.rollback()

    def count() -> None:
        nonlocal there
        there += partitions
        advance(counter, there)

    def ours() -> DataFrame:
        return setting.topic(
            client, "messages", columns="partition,offset", startingOffsets="latest"
        )

    def nothing() -> DataFrame:
        nonlocal there
        there = 0
        advance(counter, 0)
        reader = setting.spark.readStream.format(FORMAT).option("batch", sample)
        return reader.option("counter", str(counter)).option("tasks", partitions).load()

    table = {"path": str(client.path), "table": "seen"}
    return [
        _Stepper("txnkv", ours, send, "noop"),
        _Stepper("nothing", nothing, count, "noop"),
        _Stepper("txnkv, no message", ours, send_nothing, "noop"),
        _Stepper("txnkv, into a table", ours, send, "txnkv", table),
        _Stepper("nothing into nothing", nothing, count, FORMAT),
    ]


def _kafka(setting: Setting, broker: Broker, partitions: int, stack: ExitStack) -> _Stepper:
    topic = broker.create(synced=False, partitions=partitions)
    stack.callback(broker.drop, topic)
    producer = broker.producer()

    def send() -> None:
        messages = [{"value": b"x" * 100, "partition": number} for number in range(partitions)]
        producer.produce_batch(topic, messages)
        producer.flush()

    return _Stepper("kafka", lambda: kafka.stream(setting, topic, "latest"), send, "noop")


def _seconds(setting: Setting, one: _Stepper, steps: int) -> float:
    """The median of the triggers of a new query, without its first steps."""
    checkpoint = setting.base / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    writer = one.stream().writeStream.format(one.sink).options(**one.options)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        query.processAllAvailable()
        for _ in range(steps + 1):
            one.step()
            query.processAllAvailable()
        done = batches(query)
    finally:
        query.stop()
        shutil.rmtree(checkpoint, ignore_errors=True)
    if len(done) < steps + 1:
        raise RuntimeError(f"{one.name} did {len(done)} triggers of {steps + 1}")
    return statistics.median(batch.seconds for batch in done[-steps:])
