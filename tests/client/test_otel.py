"""Spans, and their context in headers; nothing of it where nobody asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from txnkv import otel


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(provider)
    exporter.provider = provider  # type: ignore[attr-defined]
    yield exporter
    otel.uninstrument()


def told(spans: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and attributes of the spans since the last call, without what differs by run."""
    found = []
    for span in spans.get_finished_spans():
        about = {k: v for k, v in span.attributes.items() if k.startswith("txnkv.")}
        assert about.pop("txnkv.store")
        assert span.attributes["db.system.name"] == "txnkv"
        found.append((span.name, about))
    spans.clear()
    return found


def test_writes_commits_and_scans(client: txnkv.Client, table: txnkv.Table, spans: Any) -> None:
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": [1, 2], "v": ["a", "b"]}))
        txn.upsert(table, (3, "c"))
    (wrote, about), (commit, done) = told(spans)
    counts = {"txnkv.inserted": 2, "txnkv.updated": 0, "txnkv.deleted": 0, "txnkv.ignored": 0}
    assert (wrote, about) == ("txnkv.write", {"txnkv.table": table.name, **counts})
    assert (commit, done["txnkv.transaction"]) == ("txnkv.commit", str(int(txn.id)))
    table.delete(3)
    assert told(spans) == [("txnkv.write", {"txnkv.table": table.name})]
    assert table.scan().to_arrow().num_rows == 2
    assert sum(batch.num_rows for batch in table.scan(where=[("id", "=", 1)]).to_batches()) == 1
    rows = [about["txnkv.rows"] for name, about in told(spans) if name == "txnkv.scan"]
    assert sorted(rows)[0] == 1
    assert sorted(rows)[-1] == 2


def test_a_commit_that_fails_says_so(client: txnkv.Client, table: txnkv.Table, spans: Any) -> None:
    txn = client.new_transaction()
    txn.upsert(table, (1, "a"))
    table.upsert((1, "b"))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    *_, span = spans.get_finished_spans()
    assert (span.name, span.status.is_ok) == ("txnkv.commit", False)
    assert span.events[0].attributes["exception.type"].endswith("TransactionConflictError")


@pytest.mark.parametrize("sender", ["transaction", "session", "producer"])
def test_the_context_goes_with_a_message(client: txnkv.Client, spans: Any, sender: str) -> None:
    topic = client.create_topic("e")
    tracer = spans.provider.get_tracer("test")
    with tracer.start_as_current_span("request") as request:
        if sender == "transaction":
            with client.transaction() as txn:
                txn.send(topic, b"1", headers={"own": b"x"})
                txn.send(topic, b"2", None, None, [("own", b"y")])
        elif sender == "session":
            with client.new_session() as session:
                session.send(topic, b"1", headers=[("own", b"x")])
                session.send(topic, b"2", headers=[("own", b"y")])
                session.flush()
        else:
            with topic.producer() as producer:
                producer.send(b"1", headers={"own": b"x"})
                producer.send(b"2", None, None, [("own", b"y")])
    spans.clear()
    with topic.subscribe("s") as subscription:
        found = subscription.receive_many(timeout=5)
    assert [message.headers[0] for message in found] == [("own", b"x"), ("own", b"y")]
    for message in found:
        with tracer.start_as_current_span("work", context=otel.context_of(message)) as work:
            assert work.parent.span_id == request.get_span_context().span_id
    fetch = next(span for span in spans.get_finished_spans() if span.name == "txnkv.fetch")
    assert [link.context.span_id for link in fetch.links] == [
        request.get_span_context().span_id
    ] * 2
    spans.clear()
    consumer = topic.consumer()
    assert consumer.poll_batch(timeout=5).num_rows == 2
    assert len(consumer.poll(timeout=0)) == 0
    assert len(topic.fetch(0, 0).records) > 0
    fetched = told(spans)
    assert [name for name, _ in fetched] == ["txnkv.fetch"] * 2
    assert fetched[0][1] == {"txnkv.topic": "e"}
    assert fetched[1][1]["txnkv.bytes"] > 0


def test_a_receive_is_told_once(client: txnkv.Client, spans: Any) -> None:
    topic = client.create_topic("events")
    with topic.subscribe("s") as subscription:
        for _ in range(3):
            topic.producer().send(b"x").result()
            spans.clear()
            assert subscription.receive(5) is not None
            assert [name for name, _ in told(spans)] == ["txnkv.fetch"]


def test_tasks_tell_in_the_span_they_are_in(
    client: txnkv.Client, table: txnkv.Table, store_path: Path, spans: Any
) -> None:
    tracer = spans.provider.get_tracer("test")

    async def main() -> None:
        async with txnkv.aio.connect(store_path) as tasks:
            with tracer.start_as_current_span("request"):
                await (await tasks.table("t")).upsert((1, "a"))
                txn = await tasks.new_transaction()
                await txn.write("t", pa.table({"id": [2]}))
                await txn.commit()
                async with tasks.transaction() as block:
                    await block.insert("t", (3, None))
                await tasks.run(lambda txn: txn.insert("t", (4, None)))
                assert (await tasks.snapshot()).blocking is not None
                await (await tasks.table("t")).scan().to_arrow()

    asyncio.run(main())
    *inside, request = spans.get_finished_spans()
    names = [span.name.removeprefix("txnkv.") for span in inside]
    assert names == ["write", "write", "commit", "commit", "commit", "scan"]
    assert {span.parent and span.parent.span_id for span in inside} == {request.context.span_id}


def test_a_commit_that_is_not_waited_for_says_how_it_ended(
    client: txnkv.Client, table: txnkv.Table, spans: Any
) -> None:
    txn, late = client.new_transaction(), client.new_transaction()
    for each in (txn, late):
        each.upsert(table, (1, "a"))
        spans.clear()
    stamp = txn.commit_async().result()
    ((name, about),) = told(spans)
    assert (name, about["txnkv.timestamp"]) == ("txnkv.commit", str(int(stamp)))
    assert isinstance(late.commit_async().exception(), txnkv.TransactionConflictError)
    (span,) = spans.get_finished_spans()
    assert (span.name, span.status.is_ok) == ("txnkv.commit", False)


def test_a_message_of_no_span_has_no_context(client: txnkv.Client, spans: Any) -> None:
    topic = client.create_topic("e")
    with client.transaction() as txn:
        txn.send(topic, b"1")
    (message,) = topic.consumer().poll()
    assert message.headers == []
    assert not otel.context_of(message)


def test_plain_methods_come_back(client: txnkv.Client, table: txnkv.Table, spans: Any) -> None:
    traced = txnkv.Transaction.commit
    otel.instrument(spans.provider)
    otel.uninstrument()
    otel.uninstrument()
    assert txnkv.Transaction.commit is traced.__wrapped__  # type: ignore[attr-defined]
    with client.transaction() as txn:
        txn.insert(table, (1, "a"))
    assert spans.get_finished_spans() == ()


def collected(reader: InMemoryMetricReader, path: Any) -> dict[str, list[Any]]:
    """The points of each metric of a store now; other tests may have left stores open."""
    data = reader.get_metrics_data()
    return {
        metric.name: [p for p in metric.data.data_points if p.attributes["txnkv.store"] == path]
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


@pytest.fixture
def numbers() -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    otel.instrument(meter_provider=provider)
    otel.instrument(meter_provider=provider)  # again, with the same instruments
    yield reader
    otel.uninstrument()
    provider.shutdown()


def test_metrics_are_those_of_the_store(
    client: txnkv.Client, table: txnkv.Table, numbers: Any
) -> None:
    before = collected(numbers, client.path)["txnkv.commits"][0].value
    for number in range(3):
        with client.transaction() as txn:
            txn.insert(table, (number, "a"))
    txn = client.new_transaction()
    txn.upsert(table, (1, "a"))
    table.upsert((1, "b"))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    client.compact()
    found, own = collected(numbers, client.path), client.metrics()
    assert found["txnkv.commits"][0].value == before + 4
    for name, value in own.items():
        kind = own.about[name][0]
        if kind != "histogram":
            (point,) = found[f"txnkv.{name}"]
            assert point.value == value or kind == "gauge", name
            assert point.attributes["txnkv.store"] == client.path
            continue
        assert found[f"txnkv.{name}.count"][0].value == value["count"], name
        assert found[f"txnkv.{name}.sum"][0].value == value["sum"], name
    assert found["txnkv.conflicts"][0].value == 1
    assert found["txnkv.flush_seconds.count"][0].value >= 1


def test_lengths_of_what_a_program_does_and_how_it_failed(
    client: txnkv.Client, table: txnkv.Table, numbers: Any
) -> None:
    topic = client.create_topic("e")
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": [1, 2], "v": ["a", "b"]}))
        txn.send(topic, b"x")
    assert table.scan().to_arrow().num_rows == 2
    assert topic.consumer().poll()
    with pytest.raises(txnkv.RowErrors):
        table.insert((1, "again"))
    points = collected(numbers, client.path)["db.client.operation.duration"]
    seen = {(p.attributes["db.operation.name"], p.attributes.get("error.type")): p for p in points}
    assert seen.keys() == {
        ("write", None), ("write", "RowErrors"), ("commit", None), ("scan", None), ("fetch", None),
    }  # fmt: skip
    for point in seen.values():
        assert (point.count, 0 < point.sum < 60) == (1, True)
        assert point.explicit_bounds[0] == 1e-6
        assert point.attributes["txnkv.store"] == client.path
    assert seen["fetch", None].attributes["txnkv.topic"] == "e"


def test_nothing_is_told_of_a_store_that_is_closed_or_after_uninstrument(
    tmp_path: Any, numbers: Any
) -> None:
    with txnkv.connect(tmp_path / "other") as other:
        path = other.path
        assert len(collected(numbers, path)["txnkv.commits"]) == 1
    assert not collected(numbers, path).get("txnkv.commits")
    with txnkv.connect(tmp_path / "other"):
        otel.uninstrument()
        assert not collected(numbers, path).get("txnkv.commits")


def test_without_the_package_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; import txnkv.otel"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "pip install 'txnkv[otel]'" in ran.stderr.splitlines()[-1]
