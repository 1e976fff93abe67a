"""Opening a store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals


def test_a_store_is_made_when_it_is_missing(store_path: Path, connect: Any) -> None:
    with pytest.raises(txnkv.StoreNotFoundError):
        txnkv.connect(store_path, create=False)
    assert not store_path.exists()
    client = connect()
    assert Path(client.path) == store_path
    assert connect(create=False).instance is client.instance
    assert txnkv.connect(str(store_path)).instance is client.instance


@pytest.mark.parametrize(
    ("path", "options", "kind", "words"),
    [
        ("x", {"history": -1}, ValueError, "0 or more"),
        (b"x", {}, TypeError, "not b'x': os.fsdecode"),
        ("x", {"cache_bytes": 0}, ValueError, "above 0"),
        ("x", {"keepalive_time": 0}, ValueError, "at least 0.5 s"),
    ],
)
def test_arguments_are_checked(
    path: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        txnkv.connect(path, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("folder", ["/proc", "/proc/x"])
def test_a_folder_that_takes_no_other_is_told(folder: str) -> None:
    with pytest.raises(txnkv.NotSupportedError, match=f"can be made in {folder}: .* another"):
        txnkv.connect(f"{folder}/y")


@pytest.mark.parametrize(
    ("option", "there", "other"),
    [
        ("history", 60.0, 900.0),
        ("cache_bytes", 1 << 20, 8 << 20),
    ],
)
def test_an_option_of_the_store_is_that_of_all_clients(
    connect: Any, option: str, there: float, other: float
) -> None:
    """It was taken and ignored, in silence, when another client had the store open."""
    first = connect(**{option: there})
    assert connect(**{option: there}).instance is connect().instance is first.instance
    with pytest.raises(ValueError, match=rf"{option}={other}: .* with {option}={there}"):
        connect(**{option: other})
    first.close()


def test_an_option_can_be_another_once_the_store_is_closed(connect: Any) -> None:
    connect().close()
    assert internals.coordinator(connect(history=60.0)).history == 60.0


def test_cache_bytes_is_what_sqlite_keeps(connect: Any) -> None:
    status = internals.status(connect(cache_bytes=3 << 20))
    for transaction in (status.read(), status.write()):
        with transaction as cur:
            assert cur.execute("PRAGMA cache_size").fetchall() == [(-3072,)]
    assert internals.store(connect(read_only=True)).cache_bytes == 3 << 20
    with pytest.raises(ValueError, match="cache_bytes"):
        connect(read_only=True, cache_bytes=1 << 20).close()


def test_read_only(client: txnkv.Client, table: txnkv.Table, connect: Any) -> None:
    with client.transaction() as txn:
        txn.insert(table, (1, "a"))
    other = client.new_transaction()
    token = other.serialize()
    with pytest.raises(txnkv.StoreNotFoundError):
        txnkv.connect(Path(client.path) / "none", read_only=True)
    reader = connect(read_only=True)
    same = reader.table("t")
    assert same.get(1) == {"id": 1, "v": "a"}
    assert list(same.scan()) == [{"id": 1, "v": "a"}]
    assert reader.check().ok
    for call in (
        reader.new_transaction,
        reader.new_session,
        lambda: reader.create_table("x", table.schema),
        lambda: reader.drop_table("t"),
        lambda: reader.abort_transaction(txn.id),
        lambda: reader.keep_transaction_alive(txn.id),
        lambda: reader.run(lambda txn: None),
        lambda: txnkv.Transaction.deserialize(reader, token),
        same.next_id,
    ):
        with pytest.raises(txnkv.NotSupportedError, match="read_only=True"):
            call()
    other.commit()
    with client.transaction() as txn:
        txn.insert(table, (2, "b"))
    assert same.count() == 2


def test_a_client_is_a_context_manager(store_path: Path, connect: Any) -> None:
    with connect() as client:
        assert client.tables() == []
    with pytest.raises(txnkv.ClosedError, match="connect again"):
        client.tables()


def test_history_is_how_long_the_ended_are_remembered(connect: Any, by_hand: Any, now: Any) -> None:
    client = connect(history=60)
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with client.transaction() as txn:
        txn.insert(table, (1,))
        txn.serialize()  # stored: the status table has to remember it
    now.forward(61)
    by_hand(client)
    with pytest.raises(txnkv.TxnNotFoundError, match="forgotten"):
        client.transaction_state(txn.id)
    assert table.count() == 1
    assert client.transactions() == []


UNWRITABLE = """
import errno
from txnkv.storage.runtime_file import RuntimeFile
client.close()
def refuse(folder):
    raise OSError(errno.EROFS, "made up")
RuntimeFile.attach = refuse
def opened():
    return txnkv.connect(client.path, read_only=True)
"""


def test_a_store_that_cannot_be_written_beside_a_process_that_has_it_open(
    client: txnkv.Client, elsewhere: Callable[..., Any]
) -> None:
    """As on a volume that is mounted to be read only: what is read there nobody knows of."""
    caught = "try:\n    opened()\nexcept txnkv.UnavailableError as error:\n    say(str(error))"
    told = elsewhere(UNWRITABLE + caught)
    assert "another process has it open" in told
    assert "read_only=True" in told


def test_a_store_that_cannot_be_written_and_is_written_by_others(
    connect: Callable[..., txnkv.Client], process: Callable[..., Any]
) -> None:
    """Who came later writes over what is read: that is no damage, and none is told of."""
    client, count = connect(history=0), 300_000
    client.create_table("t", txnkv.Schema({"id": "int64", "v": "int64"}, ["id"]))

    def write(number: int) -> None:
        with client.transaction() as txn:
            txn.write("t", pa.table({"id": range(count), "v": [number] * count}), "upsert")

    write(0)
    client.close()
    reader = process(
        UNWRITABLE + "reader = opened()\n"
        "batches = reader.table('t').scan().to_batches()\n"
        "rows = next(batches).num_rows\n"
        "say(rows)\n"
        "wait()\n"
        "try:\n"
        "    say(rows + sum(batch.num_rows for batch in batches))\n"
        "except txnkv.TxnkvError as error:\n"
        "    say((type(error).mro()[1].__name__, str(error)))\n"
    )
    assert 0 < reader.hear() < count
    client = connect(history=0)
    for number in (1, 2):
        write(number)
        client.compact()
        internals.maintenance(client).round()
    reader.tell()
    kind, said = reader.finish()
    assert kind == "UnavailableError"
    assert "was replaced while it was read" in said
