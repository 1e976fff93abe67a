"""Many small tables: what a flush asks of the disk and keeps open, counted for each of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.coordinator import damage
from txnkv.storage import environments, lmdb_open
from txnkv.storage.environment import Environment
from txnkv.storage.environments import _TABLE, OPEN_CAP
from txnkv.storage.write_queue import PATIENCE, not_waiting, patience

MANY = 40


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often environments are opened and committed to, and folders synced."""
    asked: Counter[str] = Counter()
    lock = threading.Lock()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with lock:
                asked[name] += 1
            return real(*args, **options)

        return call

    monkeypatch.setattr(_TABLE, "open_cap", OPEN_CAP)  # another test may have used up descriptors
    monkeypatch.setattr(lmdb_open, "_open_env", counted("opened", lmdb_open._open_env))
    monkeypatch.setattr(lmdb_open, "sync_directory", counted("names", lmdb_open.sync_directory))
    monkeypatch.setattr(Environment, "_write_once", counted("commits", Environment._write_once))
    return asked


def fill(client: txnkv.Client, tables: int, value: int) -> None:
    for number in range(tables):
        with client.transaction() as txn:
            txn.upsert(f"t{number}", (1, value))


@pytest.fixture
def tables(client: txnkv.Client) -> None:
    schema = txnkv.Schema({"id": "int64", "value": "int64"}, primary_key=["id"])
    for number in range(MANY):
        client.create_table(f"t{number}", schema)
    fill(client, MANY, 1)


@pytest.mark.usefixtures("by_hand")
def test_a_new_table_costs_one_opening_and_one_commit(
    client: txnkv.Client, tables: None, asked: Counter[str]
) -> None:
    internals.flush(client)
    assert asked == {"opened": MANY, "commits": MANY, "names": 2 * MANY}
    asked.clear()
    fill(client, MANY, 2)
    internals.flush(client)
    assert asked["commits"] <= 2 * MANY  # the row set, and the delete of what it replaces
    assert asked["names"] == 0
    assert [client.table(f"t{n}").get(1)["value"] for n in range(MANY)] == [2] * MANY


def test_few_stay_open_to_write(
    client: txnkv.Client, tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "WRITABLE_CAP", 4)
    internals.flush(client)
    writable = sum(each.is_writable for each in _TABLE.opened())
    assert writable <= 4 + damage.SIDE_BY_SIDE
    assert internals.store(client).environments.open_count == len(_TABLE.opened())


def test_an_error_in_one_of_many_is_told(
    client: txnkv.Client, tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lmdb_open.make_environment_files

    def refuse(path: Path, *args: Any) -> None:
        if path.name == "7":
            raise OSError(28, "No space left on device")
        real(path, *args)

    monkeypatch.setattr(environments, "make_environment_files", refuse)
    with pytest.raises(txnkv.StorageFullError):
        internals.flush(client)
    monkeypatch.undo()
    internals.flush(client)
    assert [client.table(f"t{n}").get(1)["value"] for n in range(MANY)] == [1] * MANY
    assert client.check().problems == []


def test_threads_wait_no_longer_than_who_asked() -> None:
    seen: list[float | None] = []
    with not_waiting():
        damage._share(lambda parts: seen.extend(patience() for _ in parts), [*range(MANY)], 8)
    assert seen == [PATIENCE] * MANY


def test_all_is_done_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen: list[int] = []
    damage._share(seen.extend, [*range(MANY)], 8)
    assert seen == [*range(MANY)]
