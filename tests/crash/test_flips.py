"""One byte of a stored record is another one: right data or CorruptionError, from every reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.flips import BY_OFFSET, changes, outcome, partition_of, readers, records
from txnkv.coordinator.maintenance import Maintenance
from txnkv.core import Chunk, ControlType, encode_batch, encode_control, place
from txnkv.topics import Buffer
from txnkv.topics.overview import check_partition
from txnkv.topics.topics import Partition


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background works when the test says so."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


# -- topics ----------------------------------------------------------------------------


def large(client: txnkv.Client, *, commit: bool, count: int = 2) -> None:
    """A stored transaction of so many batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
        txn = client.new_transaction(timeout=None)
        for n in range(count):
            txn.send("t", b"large %d" % n, key=b"key", partition=0)
            txn.flush()
            txn.context.ensure_large("commit")
        txn.commit() if commit else txn.rollback()


def put(client: txnkv.Client, partition: Partition, *batches: bytes) -> None:
    """Batches at the end of a log, as if they had come the usual way."""
    with partition.environment.read() as txn:
        end = partition.log.end(txn)
    placed = place(b"".join(batches), end)
    partition.environment.write(lambda txn: partition.log.put(txn, [placed]))
    with partition.environment.read() as txn:
        end = partition.log.end(txn)
    with internals.status(client).write() as cur:
        cur.execute("UPDATE partitions SET next_offset = ? WHERE id = ?", (end, partition.id))


def everything(client: txnkv.Client, buffer: Buffer) -> Partition:
    """A log of one partition with every kind of record that a log can have."""
    client.create_topic("t", buffer=buffer, compression="zstd")
    partition = partition_of(client, "t")
    with client.transaction() as txn:
        txn.send("t", b"headers", key=b"k", headers=[("a", b"1"), ("b", b"")], partition=0)
        txn.send("t", None, key=b"k", partition=0)
    with client.topic("t").producer("p") as producer:
        producer.send(b"idempotent", partition=0).result()
    with client.transaction() as txn:
        txn.send("t", b"compressed " * 50, partition=0)
    internals.flush(client)
    large(client, commit=True)
    large(client, commit=False)
    values = pa.record_batch({"value": pa.array([b"piece"])})
    pieces = [encode_batch(values, timestamp=7, chunk=Chunk(99, n, 2, 10)) for n in range(2)]
    put(client, partition, *pieces, encode_control(ControlType.FILLER, count=3, timestamp=7))
    for n in range(3):
        client.new_session().send("t", b"plain %d" % n, partition=0)
        with client.transaction() as txn:
            txn.send("t", b"small %d" % n, partition=0)
        internals.flush(client)
    large(client, commit=True, count=3)
    large(client, commit=False)
    with client.transaction() as txn:
        txn.send("t", b"last", partition=0)
    internals.flush(client)
    return partition


@pytest.fixture(params=["marker", "sidecar"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[txnkv.Client, Partition]]:
    with txnkv.connect(tmp_path / "store") as client:
        buffer: Buffer = request.param
        yield client, everything(client, buffer)


LOG = (b"log", b"state", b"aborted", b"commits", b"open", b"snapshots", b"segments")
SIDE = (b"side", b"side_transactions", b"side_by_marker")


def sweep(client: txnkv.Client, partition: Partition, stride: int) -> int:
    engine, label = internals.topics(client), partition.label
    with partition.environment.read() as txn:
        middle = partition.log.end(txn) // 2
    every = readers(middle)
    right = {name: outcome(reader, client, "t") for name, reader in every.items()}
    assert all(rows and error is None for rows, error in right.values()), right
    assert not list(check_partition(engine, partition.id))
    count = 0
    wrong: list[str] = []
    for number, record in enumerate(records(partition.environment, (*LOG, *SIDE))):
        for at, to in changes(record.value, stride, begin=number % stride):
            where = f"{record.name}, byte {at}: {record.value[at]:#x} -> {to:#x}"
            with record.changed(at, to):
                seen = 0
                for name, reader in every.items():
                    count += 1
                    try:
                        rows, error = outcome(reader, client, "t")
                    except Exception as other:
                        wrong.append(f"{where}: {name}: {other!r}")
                        continue
                    expected = right[name][0]
                    seen += error is not None
                    if rows != (expected if error is None else expected[: len(rows)]):
                        wrong.append(f"{where}: {name}: {error}: {rows} for {expected}")
                    named = "offset" if record.db != b"state" else label
                    if error is not None and not (label in error and named in error):
                        wrong.append(f"{where}: {name}: not named: {error}")
                    if error is not None and record.db == b"log" and name in BY_OFFSET:
                        below = [row for row in expected if int_of(row) < record.batch_of(at)]
                        if rows[: len(below)] != below:
                            wrong.append(f"{where}: {name}: {error}: gave {rows} for {below}")
                try:
                    found = list(check_partition(engine, partition.id))
                except Exception as other:
                    wrong.append(f"{where}: check: {other!r}")
                    continue
                if seen and not found:
                    wrong.append(f"{where}: check says nothing")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(line[:300] for line in wrong[:400])
    for name, reader in every.items():
        assert outcome(reader, client, "t") == right[name]
    return count


def int_of(row: tuple[object, ...]) -> int:
    offset = row[0]
    assert isinstance(offset, int)
    return offset


def test_some_bytes_of_a_log(log: tuple[txnkv.Client, Partition]) -> None:
    assert sweep(*log, stride=67) > 300


@pytest.mark.slow
def test_each_byte_of_a_log(log: tuple[txnkv.Client, Partition]) -> None:
    assert sweep(*log, stride=1) > 5000
