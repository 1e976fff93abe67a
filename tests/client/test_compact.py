"""client.compact(): what it merges, what it gives back, and who may use the store meanwhile."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.metrics import SECONDS
from txnkv.storage import StatusDatabase, extents

ROWS = 120_000


def data(first: int, value: str) -> pa.Table:
    ids = range(first, first + ROWS)
    return pa.table({"id": ids, "v": [f"{value} {i}" for i in ids]})


def file_bytes(path: Path) -> int:
    return sum((each / "data.mdb").stat().st_size for each in (path / "tablets").iterdir())


def allocated(path: Path, folder: str = "tablets") -> int:
    files = (each / "data.mdb" for each in (path / folder).iterdir())
    return sum(file.stat().st_blocks * 512 for file in files)


@pytest.fixture(autouse=True)
def quiet(by_hand: Callable[[txnkv.Client], None]) -> None:
    """No background rounds in this process."""


@pytest.fixture
def client(connect: Callable[..., txnkv.Client]) -> txnkv.Client:
    return connect(history=0.0)


def fill(client: txnkv.Client) -> None:
    for value in ("one", "two", "three"):
        with client.transaction() as txn:
            txn.write("t", data(0, value), op="upsert")
    with client.transaction() as txn:
        txn.write("t", data(ROWS // 2, "").select(["id"]), op="delete_ignore")


def test_space_comes_back(client: txnkv.Client, table: txnkv.Table, store_path: Path) -> None:
    fill(client)
    before = file_bytes(store_path)
    done: list[tuple[int, int]] = []
    report = client.compact(lambda *at: done.append(at))
    assert report.rows_after == ROWS // 2
    assert report.row_sets_after == 1
    assert report.collected == report.row_sets_before + 1 == 4  # one of deleted keys
    assert report.in_use == 0
    assert file_bytes(store_path) < before / 3
    assert report.files_after < report.files_before / 3
    assert done[0][0] == 0
    assert done[-1] == (report.rows_before, report.rows_before)
    assert table.count() == ROWS // 2
    assert table.get(7) == {"id": 7, "v": "three 7"}
    assert table.get(ROWS - 1) is None
    assert client.check().problems == []
    again = client.compact()
    assert (again.row_sets_before, again.files_after) == (0, report.files_after)


def test_writes_go_on_after_the_file_was_replaced(
    client: txnkv.Client, table: txnkv.Table, connect: Callable[..., txnkv.Client]
) -> None:
    fill(client)
    scan = iter(table.scan().to_batches())
    rows = next(scan).num_rows
    client.compact()
    rows += sum(batch.num_rows for batch in scan)
    assert rows == ROWS // 2
    with client.transaction() as txn:
        txn.write("t", data(0, "four"), op="upsert")
    assert table.get(7) == {"id": 7, "v": "four 7"}
    client.close()
    assert connect().table("t").count() == ROWS


def merge_and_write(client: txnkv.Client) -> None:
    internals.compact(client)
    with client.transaction() as txn:  # what was freed last is not free for the next
        txn.write("t", data(0, "three").slice(0, 10), op="upsert")
    internals.flush(client)


def test_the_leader_gives_room_back(
    client: txnkv.Client, table: txnkv.Table, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "LEAST_FREE_BYTES", 0)
    fill(client)
    internals.flush(client)
    merge_and_write(client)
    before, room = file_bytes(store_path), allocated(store_path)
    assert internals.maintenance(client).round(resume_all=True)
    assert allocated(store_path) < room / 2
    assert file_bytes(store_path) == before
    assert table.count() == ROWS // 2
    assert client.check().problems == []


def test_room_is_given_back_while_another_process_reads(
    client: txnkv.Client,
    table: txnkv.Table,
    process: Callable[..., Any],
    store_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extents, "LEAST_FREE_BYTES", 0)
    fill(client)
    other = process(
        """
        table = client.table("t")
        while wait():
            say((table.count(), table.get(7)["v"]))
        """
    )
    other.tell("look")
    assert other.hear() == (ROWS // 2, "three 7")
    merge_and_write(client)
    room = allocated(store_path)
    assert internals.store(client).environments.give_room_back() > room / 2
    assert allocated(store_path) < room / 2
    other.tell("look")
    assert other.hear() == (ROWS // 2, "three 7")
    assert table.get(7) == {"id": 7, "v": "three 7"}


@pytest.mark.parametrize("reopened", [False, True])
def test_room_of_a_log_that_was_emptied_last(store_path: Path, reopened: bool) -> None:
    """Nobody writes to it any more, and after a start this process never did."""
    with txnkv.connect(store_path, history=0.0) as client:
        topic = client.create_topic("e")
        for _ in range(24):
            client.run(lambda txn: txn.send(topic, bytes(1_000_000)))
        internals.flush(client)
        assert allocated(store_path, "logs") > 20_000_000
        topic.truncate("latest")
        if not reopened:
            client.compact()
    if reopened:
        with txnkv.connect(store_path) as client:
            client.compact()
    assert allocated(store_path, "logs") < 9_000_000
    with txnkv.connect(store_path) as client:
        client.run(lambda txn: txn.send("e", b"new"))
        assert [each.value for each in client.topic("e").consumer().poll(timeout=1)] == [b"new"]
        assert client.check().problems == []


def test_the_status_database_gets_shorter(
    client: txnkv.Client, process: Callable[..., Any], store_path: Path, now: Any
) -> None:
    """By what small commits took that were written out since; others use it meanwhile."""
    other = process(
        """
        while key := wait():
            client.run(lambda txn: txn.insert("t", (int(key), b"other")))
            say(client.table("t").count())
        """
    )
    table = client.create_table(
        "t", txnkv.Schema({"id": "int64", "v": "binary"}, primary_key=["id"])
    )
    for key in range(240):
        client.run(lambda txn, key=key: txn.insert(table, (key, os.urandom(60_000))))
    other.tell("1000")
    assert other.hear() == 241
    internals.status(client).checkpoint()
    file, rows = store_path / "status.db", table.scan().to_arrow()
    assert file.stat().st_size > 14_000_000
    internals.flush(client)
    now.forward(61)  # what is written out is kept for a minute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatusDatabase, "checkpoint", lambda *_, **__: None)  # others are in its way
        client.compact()
    client.compact()
    assert file.stat().st_size < 1_000_000
    assert table.scan().to_arrow().equals(rows)
    other.tell("1001")  # with statements that it prepared before
    assert other.hear() == 242
    client.run(lambda txn: txn.insert(table, (2000, b"here")))
    assert table.count() == 243


def test_a_death_behind_the_shortening(
    connect: Callable[..., txnkv.Client], process: Callable[..., Any], store_path: Path
) -> None:
    """All is in the WAL then, the next commits too."""
    child = process(
        """
        from txnkv.storage import clock
        schema = txnkv.Schema({"id": "int64", "v": "binary"}, primary_key=["id"])
        table = client.create_table("t", schema)
        for key in range(240):
            client.run(lambda txn: txn.insert(table, (key, bytes([key]) * 60_000)))
        client.compact()
        later, at = clock.monotonic_micros, clock.now_micros
        with clock.replaced(wall=lambda: at() + 61_000_000, monotonic=lambda: later() + 61_000_000):
            client.compact()
        """,
        fault="status.shortened=kill",
    )
    child.finish(-9)
    client = connect()
    table = client.table("t")
    assert table.scan(ordered=True).to_arrow()["v"].to_pylist() == [
        bytes([key]) * 60_000 for key in range(240)
    ]
    client.run(lambda txn: txn.insert(table, (1000, b"")))
    client.compact()
    assert (store_path / "status.db").stat().st_size < 1_000_000
    assert table.count() == 241
    assert client.check().problems == []


def test_a_file_that_another_process_has_open_stays(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Any], store_path: Path
) -> None:
    fill(client)
    other = process(
        """
        table = client.table("t")
        say(table.count())
        while wait():
            say((table.count(), table.get(7)["v"]))
        """
    )
    assert other.hear() == ROWS // 2
    before = file_bytes(store_path)
    report = client.compact()
    assert report.in_use == 1
    assert file_bytes(store_path) >= before
    other.tell("look")
    assert other.hear() == (ROWS // 2, "three 7")
    other.kill()
    with client.transaction() as txn:
        txn.upsert("t", {"id": 7, "v": "seven"})
    report = client.compact()
    assert report.in_use == 0
    assert file_bytes(store_path) < before / 3
    assert table.get(7) == {"id": 7, "v": "seven"}


def test_a_fork_while_a_compaction_runs(
    client: txnkv.Client, table: txnkv.Table, store_path: Path
) -> None:
    """The lock of a compaction is not waited for by a fork, and a child does not free it."""
    with client.transaction() as txn:
        txn.upsert("t", {"id": 1, "v": "a"})
    with internals.store(client).compaction():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with client.transaction() as txn:
                    txn.upsert("t", {"id": 2, "v": "b"})
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert client.compact().rows_after in (0, 2)
    assert table.count() == 2


def test_a_client_that_may_only_read_does_not_compact(
    client: txnkv.Client, connect: Callable[..., txnkv.Client]
) -> None:
    client.close()
    with connect(read_only=True) as reader, pytest.raises(txnkv.NotSupportedError):
        reader.compact()


def test_metrics_count_what_was_done(client: txnkv.Client, table: txnkv.Table) -> None:
    for value in "abc":
        with client.transaction() as txn:
            txn.upsert("t", {"id": 1, "v": value})
    client.compact()
    found = client.metrics()
    assert found["flushes"] == 1
    assert found["flushed_rows"] == 1
    assert found["dropped_versions"] == 2
    assert found["flush_seconds"]["count"] == 1
    assert found["commit_groups"] == found["small_commits"] == found["commits"] == 3
    assert found["commit_seconds"]["count"] == 3
    assert found["log_commits"] == 0


def test_metrics_as_openmetrics_text(client: txnkv.Client, table: txnkv.Table) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    with client.transaction() as txn:
        txn.upsert("t", {"id": 1, "v": "a"})
    internals.flush(client)
    text = client.metrics().openmetrics()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["txnkv_flushes"].samples[0].value == 1
    assert families["txnkv_flush_seconds"].type == "histogram"
    buckets = [s for s in families["txnkv_flush_seconds"].samples if s.name.endswith("_bucket")]
    assert [float(s.labels["le"]) for s in buckets] == [*SECONDS, math.inf]  # sums need each
    assert {name.removeprefix("txnkv_") for name in families} == set(client.metrics())


def test_what_topics_do_not_retain_goes(client: txnkv.Client) -> None:
    old = datetime(2026, 1, 1, tzinfo=UTC)
    topics = [
        client.create_topic("by age", retention_seconds=3600),
        client.create_topic("by size", retention_bytes=1, segment_bytes=4096),
        client.create_topic("kept"),
    ]
    with client.transaction() as txn:
        for topic in topics:
            for _ in range(2):
                txn.send(topic, b"x" * 5000, timestamp=old)
    with client.transaction() as txn:
        for topic in topics:
            txn.send(topic, b"last")
    open_still = client.new_transaction()
    open_still.send("by age", b"undecided")
    open_still.flush()
    client.compact()
    open_still.rollback()
    client.compact()

    def values(topic: txnkv.Topic) -> list[bytes]:
        with topic.consumer() as consumer:
            return [message.value[-4:] for message in consumer.poll(timeout=1)]

    assert values(topics[2]) == [b"xxxx", b"xxxx", b"last"]
    assert [values(topic) for topic in topics[:2]] == [[b"last"], [b"last"]]
