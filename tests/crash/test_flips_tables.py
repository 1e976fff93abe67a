"""One byte of a stored row, or of a small commit, is another one: right data or CorruptionError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.flips import Reader, Row, changes, outcome, records
from txnkv.coordinator.maintenance import Maintenance
from txnkv.tables.tablets import row_set_format
from txnkv.tables.tablets.tablet import Tablet
from txnkv.tables.tablets.tablet_files import BLOCKS_DB

BLOCK_ROWS = 16


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background works when the test says so; blocks are small."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    monkeypatch.setattr(row_set_format, "BLOCK_ROWS", BLOCK_ROWS)


SCHEMA = {"name": "string", "id": "int64", "number": "int64?", "text": "string?", "real": "float64"}


def row(id: int, text: str = "text") -> dict[str, Any]:
    number = None if id % 3 == 0 else id * 7
    return {
        "name": f"name {id // 8}",
        "id": id,
        "number": number,
        "text": None if id % 5 == 0 else f"{text} {id}",
        "real": id / 7,
    }


def arrow(ids: range, text: str = "text") -> pa.Table:
    return pa.Table.from_pylist([row(id, text) for id in ids])


def everything(client: txnkv.Client) -> list[txnkv.Timestamp]:
    """A tablet with every kind of record that one can have.

    Returns:
        Times in between, where the table can be read.
    """
    table = client.create_table("t", txnkv.Schema(SCHEMA, primary_key=["name", "id"]))
    times = []

    def step(change: Callable[[txnkv.Transaction], object]) -> None:
        with client.transaction() as txn:
            change(txn)
        internals.flush(client)
        times.append(client.snapshot().timestamp)

    def upsert(ids: range, text: str) -> None:
        step(lambda txn: txn.write(table, arrow(ids, text), op="upsert"))

    def delete(ids: range) -> None:
        keys = arrow(ids).select(["name", "id"])
        step(lambda txn: txn.write(table, keys, op="delete"))

    upsert(range(40), "first")
    upsert(range(10, 20), "second")
    client.compact()  # one row set with versions
    delete(range(3, 30, 9))
    upsert(range(30, 60), "third")
    delete(range(50, 60, 4))
    return times


def tablet_of(client: txnkv.Client) -> Tablet:
    tables = internals.tables(client)
    (found,) = tables.tablets(tables.get("t"))
    return found


def readers(times: list[txnkv.Timestamp]) -> dict[str, Reader]:
    """Every way to read a table."""
    keys = [(row(id)["name"], id) for id in (*range(0, 60, 4), 99)]

    def scan(**how: Any) -> Reader:
        def read(client: txnkv.Client, name: str) -> Iterator[Row]:
            yield from (tuple(found.values()) for found in client.table(name).scan(**how))

        return read

    def get(client: txnkv.Client, name: str) -> Iterator[Row]:
        for key in keys:
            yield key, client.table(name).get(key)

    def get_before(client: txnkv.Client, name: str) -> Iterator[Row]:
        for key in keys:
            yield key, client.table(name).get(key, snapshot=times[0])

    def get_many(client: txnkv.Client, name: str) -> Iterator[Row]:
        yield tuple(map(repr, client.table(name).get_many(keys).to_pylist()))

    def count(client: txnkv.Client, name: str) -> Iterator[Row]:
        yield (client.table(name).count(where=[("number", ">", 100)]),)

    def diff(client: txnkv.Client, name: str) -> Iterator[Row]:
        for batch in client.table(name).diff(times[0], times[-1]):
            yield from (tuple(found.values()) for found in batch.to_pylist())

    def tokens(client: txnkv.Client, name: str) -> Iterator[Row]:
        for token in client.table(name).scan().tokens():
            yield from (tuple(found.values()) for found in token.open(client))

    def written(client: txnkv.Client, name: str) -> Iterator[Row]:
        """Yield what a transaction is told of each key that it writes; it is rolled back."""
        for _, id in keys:
            txn = client.new_transaction()
            try:
                txn.update(name, {**row(id), "text": "new"})
                txn.flush()
                yield (id, "was there")
            except txnkv.RowErrors:
                yield (id, "was not there")
            finally:
                txn.rollback()

    return {
        "scan": scan(),
        "ordered": scan(ordered=True),
        "columns": scan(columns=["text"]),
        "where": scan(where=[("number", ">", 100), ("text", "is not null")]),
        "one key": scan(where=[("name", "=", "name 2")]),
        "before": scan(snapshot=times[0]),
        "between": scan(snapshot=times[2]),
        "get": get,
        "get before": get_before,
        "get_many": get_many,
        "count": count,
        "diff": diff,
        "tokens": tokens,
        "update": written,
    }


def sweep(client: txnkv.Client, times: list[txnkv.Timestamp], stride: int) -> int:
    tablet = tablet_of(client)
    every = readers(times)

    def fresh(reader: Reader) -> tuple[list[Row], str | None]:
        """Read as a process does that has not verified anything yet."""
        tablet._row_sets.clear()
        tablet.chains = None
        return outcome(reader, client, "t")

    right = {name: fresh(reader) for name, reader in every.items()}
    assert all(rows and error is None for rows, error in right.values()), right
    assert client.check().problems == []
    count = 0
    wrong: list[str] = []
    stored = records(tablet.environment(), (BLOCKS_DB,))
    for number, record in enumerate(stored):
        for at, to in changes(record.value, stride, begin=number % stride):
            where = f"{record.name}, byte {at}: {record.value[at]:#x} -> {to:#x}"
            with record.changed(at, to):
                seen = False
                for name, reader in every.items():
                    count += 1
                    try:
                        rows, error = fresh(reader)
                    except Exception as other:
                        wrong.append(f"{where}: {name}: {other!r}")
                        continue
                    expected = right[name][0]
                    if rows != (expected if error is None else expected[: len(rows)]):
                        wrong.append(f"{where}: {name}: {error}: {rows} for {expected}")
                    if error is not None and tablet.label not in error:
                        wrong.append(f"{where}: {name}: not named: {error}")
                    seen = seen or error is not None
                found = client.check().problems
                if not found:
                    wrong.append(f"{where}: check says nothing")
                if not all("'t'" in problem for problem in found):
                    wrong.append(f"{where}: check: {found}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(line[:300] for line in wrong[:100])
    for name, reader in every.items():
        assert fresh(reader) == right[name]
    return count


@pytest.fixture
def client(tmp_path: Path) -> Iterator[txnkv.Client]:
    with txnkv.connect(tmp_path / "store") as client:
        yield client


def test_some_bytes_of_a_table(client: txnkv.Client) -> None:
    assert sweep(client, everything(client), stride=97) > 300


@pytest.mark.slow
def test_each_byte_of_a_table(client: txnkv.Client) -> None:
    count = sweep(client, everything(client), stride=1)
    print(f"{count} reads")
    assert count > 5000
