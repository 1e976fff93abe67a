"""Tables that keep versions longer, or shorter, than their store."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.storage import directory
from txnkv.storage.directory import StoreDirectory
from txnkv.tables.maintenance import history

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])
TABLES: dict[str, Any] = {"plain": None, "long": 60_000.0, "ever": "unlimited", "short": 500.0}
STORE = 6000.0


def written(client: txnkv.Client, value: str) -> txnkv.Timestamp:
    """Row 1 of each table has a value, and is deleted and there again in between."""
    with client.transaction() as txn:
        for name in TABLES:
            txn.upsert(name, (1, value))
    internals.flush(client)
    return txn.commit()


@pytest.fixture
def client(connect: Callable[..., txnkv.Client]) -> txnkv.Client:
    """A store with 6,000 seconds of history, and tables of each kind."""
    client = connect(history=STORE)
    for name, kept in TABLES.items():
        client.create_table(name, SCHEMA, history=kept)
    return client


def readable(client: txnkv.Client, at: txnkv.Timestamp) -> dict[str, str]:
    """By table what is read at a time, where that is not gone; alike in each way to read."""
    found = {}
    for name in client.tables():
        table = client.table(name)
        try:
            rows = list(table.scan(snapshot=at))
        except txnkv.HistoryExpiredError:
            whose = "the store" if TABLES[name] is None else f"table {name!r}"
            with pytest.raises(txnkv.HistoryExpiredError, match=f"{whose}'s history"):
                table.get(1, snapshot=at)
            continue
        assert [table.get(1, snapshot=at)] == rows
        found[name] = rows[0]["v"]
    return found


def test_each_table_keeps_what_it_says(client: txnkv.Client, now: Any) -> None:
    assert [client.table(name).history for name in TABLES] == [None, 60_000.0, math.inf, 500.0]
    first = written(client, "a")
    for wait, kept in [(0, 4), (1000, 3), (6100, 2), (60_000, 1)]:
        now.forward(wait)
        written(client, f"after {wait}")
        client.compact()
        wanted = ["ever", "long", "plain", "short"][:kept]
        assert readable(client, first) == dict.fromkeys(wanted, "a")
    with client.snapshot(at=first) as snapshot:
        assert snapshot.get("ever", 1) == {"id": 1, "v": "a"}
        with pytest.raises(txnkv.HistoryExpiredError, match="the store's history"):
            snapshot.get("plain", 1)
    assert client.check().ok


def test_a_snapshot_keeps_what_a_short_history_would_not(client: txnkv.Client, now: Any) -> None:
    written(client, "a")
    with client.snapshot() as snapshot:
        for _ in range(2):
            now.forward(1000)
            written(client, "b")
            client.compact()
        assert snapshot.get("short", 1) == {"id": 1, "v": "a"}
        client.table("short").restore(snapshot)
    assert client.table("short").get(1) == {"id": 1, "v": "a"}


def test_a_history_is_changed(
    client: txnkv.Client, now: Any, connect: Callable[..., txnkv.Client]
) -> None:
    """Another process has the tablets open with what they were."""
    other = connect(history=STORE)
    first = written(client, "a")
    assert readable(other, first)["plain"] == "a"
    client.table("plain").alter(history="unlimited")
    client.table("ever").alter(history=None)
    client.table("long").alter(history=500)
    assert [client.table(name).history for name in TABLES] == [math.inf, 500.0, None, 500.0]
    now.forward(6100)
    written(client, "b")
    client.compact()
    assert other.table("plain").get(1, snapshot=first) == {"id": 1, "v": "a"}
    for name in ("ever", "long"):
        with pytest.raises(txnkv.HistoryExpiredError):
            other.table(name).get(1, snapshot=first)
    # What is gone does not come back, and the floor of a shorter one stays.
    client.table("long").alter(history="unlimited")
    with pytest.raises(txnkv.HistoryExpiredError):
        client.table("long").get(1, snapshot=first)
    before = client.table("plain").schema
    client.table("plain").alter(add={"more": "int8?"})
    assert client.table("plain").scan(snapshot=first).to_arrow().schema == before.arrow


def test_columns_of_before_stay_as_long_as_the_history(client: txnkv.Client, now: Any) -> None:
    """Schemas were forgotten below the store's floor."""
    first = written(client, "a")
    for number in range(3):
        client.table("ever").alter(add={f"c{number}": "int8?"}, drop=["v"] if number == 0 else [])
        now.forward(6100)
        for name in TABLES:
            client.table(name).upsert({"id": 2})
        client.compact()
    assert list(client.table("ever").scan(snapshot=first)) == [{"id": 1, "v": "a"}]


def test_an_index_has_the_history_of_its_table(client: txnkv.Client, now: Any) -> None:
    client.create_index("ever", "v")
    first = written(client, "a")
    now.forward(6100)
    written(client, "b")
    client.compact()
    with client.snapshot(at=first) as snapshot:
        assert snapshot.get_by("ever", "v", "a") == [{"id": 1, "v": "a"}]
    assert client.table("ever").get_by("v", "a") == []
    assert client.check().ok


def test_changes_are_told_as_long_as_the_history(client: txnkv.Client, now: Any) -> None:
    first = written(client, "a")
    written(client, "b")
    now.forward(6100)
    last = written(client, "c")
    client.compact()
    found = client.table("ever").diff(first, last).read_all()
    assert found.column("v").to_pylist() == ["c"]
    with pytest.raises(txnkv.HistoryExpiredError):
        client.table("plain").diff(first, last).read_all()


def test_refused(client: txnkv.Client) -> None:
    for wrong, error in [(-1, ValueError), ("long", TypeError), (True, TypeError)]:
        with pytest.raises(error, match="history is"):
            client.create_table("no", SCHEMA, history=wrong)  # type: ignore[arg-type]
        with pytest.raises(error, match="history is"):
            client.table("plain").alter(history=wrong)  # type: ignore[arg-type]
    assert "no" not in client.tables()
    assert client.create_table("long", SCHEMA, exists_ok=True).history == 60_000.0
    assert client.create_table("long", SCHEMA, exists_ok=True, history=60_000).history == 60_000.0
    with pytest.raises(txnkv.TableExistsError, match="its history is 60000 seconds, not 7"):
        client.create_table("long", SCHEMA, exists_ok=True, history=7)


def test_stores_without_one_are_as_they_were(
    connect: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(history=STORE)
    client.create_table("t", SCHEMA).alter(history=None)
    with internals.status(client).read() as cur:
        assert cur.execute("SELECT 1 FROM sqlite_schema WHERE name = 'table_history'").get is None
    assert internals.store(client).directory.features == []
    client.table("t").alter(history=3)
    client.close()
    with monkeypatch.context() as patch:
        patch.setattr(directory, "KNOWN_FEATURES", frozenset())
        with pytest.raises(txnkv.IncompatibleStoreError, match="table_history"):
            txnkv.connect(client.path)


def test_backups_and_dumps_have_it(client: txnkv.Client, tmp_path: Path, now: Any) -> None:
    first = written(client, "a")
    now.forward(6100)
    written(client, "b")
    client.compact()
    client.backup(tmp_path / "backup")
    txnkv.restore(tmp_path / "backup", tmp_path / "restored")
    with txnkv.connect(tmp_path / "restored", history=STORE) as restored:
        assert restored.table("ever").history == math.inf
        assert readable(restored, first) == {"long": "a", "ever": "a"}
    client.close()
    txnkv.dump(client.path, tmp_path / "dump")
    txnkv.restore(tmp_path / "dump", tmp_path / "made")
    with txnkv.connect(tmp_path / "made") as made:
        assert [made.table(name).history for name in TABLES] == [None, 60_000.0, math.inf, 500.0]
    assert StoreDirectory.open(tmp_path / "made").features == ["table_history"]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_any_course_reads_what_was_there_or_says_that_it_is_gone(
    seed: int, connect: Callable[..., txnkv.Client], now: Any
) -> None:
    """Against a dict of each commit: within the history all is there, beyond it may be gone."""
    chance = random.Random(seed)
    client = connect(history=2000.0)
    for name, kept in {**TABLES, "long": 6000.0}.items():
        client.create_table(name, SCHEMA, history=kept)
    seconds = {"plain": 2000.0, "long": 6000.0, "ever": math.inf, "short": 500.0}
    states: list[tuple[txnkv.Timestamp, dict[str, dict[int, str]]]] = []
    rows: dict[str, dict[int, str]] = {name: {} for name in TABLES}
    for step in range(40):
        with client.transaction() as txn:
            for name in chance.sample(sorted(TABLES), 2):
                key = chance.randint(0, 3)
                if key in rows[name] and chance.random() < 0.3:
                    txn.delete(name, key)
                    rows[name] = {k: v for k, v in rows[name].items() if k != key}
                else:
                    txn.upsert(name, (key, str(step)))
                    rows[name] = rows[name] | {key: str(step)}
        states.append((txn.commit(), dict(rows)))
        now.forward(chance.choice([0, 100, 400]))
        doing = chance.choice(["nothing", "flush", "compact", "reopen"])
        if doing == "flush":
            internals.flush(client)
        elif doing == "compact":
            client.compact()
        elif doing == "reopen":
            client.close()
            client = connect(history=2000.0)
        present = internals.coordinator(client).snapshot_at(txnkv.Timestamp(states[-1][0]))
        for at, then in chance.sample(states, min(len(states), 5)):
            for name in TABLES:
                try:
                    found = {row["id"]: row["v"] for row in client.table(name).scan(snapshot=at)}
                except txnkv.HistoryExpiredError:
                    age = timedelta(seconds=seconds[name]) if seconds[name] < math.inf else None
                    assert age is not None
                    assert present.datetime - at.datetime > age - timedelta(seconds=400)
                    continue
                assert found == then[name]
    assert history.floor(internals.tables(client)).own
    assert client.check().ok
