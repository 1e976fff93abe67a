"""One byte of a small commit is another one: the part that it is of says so, all others go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.flips import changes
from txnkv.coordinator import payload
from txnkv.coordinator.maintenance import Maintenance

TABLES = ("a", "b")
TOPICS = ("x", "y")
COMMITS = 3


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep small commits in the commit log until the test says so: no maintenance runs."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


def make(path: Path) -> None:
    """A few small commits, each of two tables, two topics and an acknowledgement."""
    schema = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])
    with txnkv.connect(path) as client:
        for name in TABLES:
            client.create_table(name, schema)
        for name in (*TOPICS, "in"):
            client.create_topic(name)
        with client.transaction() as txn:
            for _ in range(COMMITS):
                txn.send("in", b"work")
        internals.flush(client)
        with client.topic("in").subscribe("work", start="earliest") as work:
            for number in range(COMMITS):
                with client.transaction() as txn:
                    for name in TABLES:
                        txn.insert(name, (number, f"text of {name}"))
                    for name in TOPICS:
                        txn.send(name, b"message %d" % number, headers=[("a", b"1")])
                    message = work.receive(timeout=10)
                    assert message is not None
                    txn.ack(work, message)


def polled(client: txnkv.Client, topic: str, **how: Any) -> tuple[list[bytes], str | None]:
    """Return the messages that a consumer gives, and the error that ends it."""
    found: list[bytes] = []
    with client.topic(topic).consumer(**how) as consumer:
        try:
            for _ in range(2 * COMMITS):  # a poll may find nothing, and others behind it messages
                found += [message.value or b"" for message in consumer.poll(timeout=0.0)]
        except txnkv.CorruptionError as error:
            return found, str(error)
    return found, None


def rows_of(table: txnkv.Table) -> list[dict[str, Any]]:
    return list(table.scan(ordered=True))


def asked(question: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return question(), None
    except txnkv.CorruptionError as error:
        return None, str(error)


def answers(client: txnkv.Client) -> dict[str, dict[str, tuple[Any, str | None]]]:
    """By part what each kind of reader gives, and its error."""
    found: dict[str, dict[str, tuple[Any, str | None]]] = {}
    for name in TABLES:
        table = client.table(name)
        found[f"table {name!r}"] = {
            "get": asked(partial(table.get, 1)),
            "get_many": asked(partial(table.get_many, [0, 1])),
            "scan": asked(partial(rows_of, table)),
            "count": asked(table.count),
        }
    for name in TOPICS:
        found[f"topic {name!r}"] = {
            "read_committed": polled(client, name),
            "read_uncommitted": polled(client, name, isolation="read_uncommitted"),
            "commit order": polled(client, name, order="commit"),
        }
    return found


def stored(client: txnkv.Client) -> list[tuple[int, bytes]]:
    with internals.status(client).read() as cur:
        return list(cur.execute("SELECT commit_ts, payload FROM commit_log ORDER BY commit_ts"))


def put(client: txnkv.Client, stamp: int, data: bytes) -> None:
    with internals.status(client).write() as cur:
        cur.execute("UPDATE commit_log SET payload = ? WHERE commit_ts = ?", (data, stamp))


def sweep(path: Path, stride: int) -> tuple[int, int]:
    """Change bytes of the commit in the middle.

    Returns:
        How many were changed, and how many of these no reader noticed.
    """
    make(path)
    with txnkv.connect(path, create=False) as client:
        right = answers(client)
        assert client.check().ok
        stamp, whole = stored(client)[-2]
    assert all(found and error is None for part in right.values() for found, error in part.values())
    count = unnoticed = 0
    wrong = []
    for at, to in changes(whole, stride):
        count += 1
        with txnkv.connect(path, create=False) as client:
            put(client, stamp, whole[:at] + bytes([to]) + whole[at + 1 :])
        with txnkv.connect(path, create=False) as client:
            parts = answers(client)
            failing = [name for name, part in parts.items() if part != right[name]]
            unnoticed += not failing
            if len(failing) > 1:
                wrong.append(f"byte {at}: {failing}")
            for name, part in ((name, parts[name]) for name in failing):
                for how, (rows, error) in part.items():
                    if error is None or name not in error:
                        wrong.append(f"byte {at}: {name}, {how}: {rows}, {error}")
                    if name.startswith("topic") and rows != right[name][how][0][: COMMITS - 2]:
                        wrong.append(f"byte {at}: {name}, {how}: gave {rows}")
            if not any(f"commit {stamp}" in problem for problem in client.check().problems):
                wrong.append(f"byte {at}: check says {client.check().problems}")
            put(client, stamp, whole)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(line[:300] for line in wrong[:50])
    return count, unnoticed


def test_some_bytes_of_a_commit(tmp_path: Path) -> None:
    count, unnoticed = sweep(tmp_path / "store", stride=41)
    assert count > unnoticed > 0, "a directory that is there twice is nobody's part"


@pytest.mark.slow
def test_each_byte_of_a_commit(tmp_path: Path) -> None:
    count, unnoticed = sweep(tmp_path / "store", stride=1)
    print(f"{count} changes, {unnoticed} of them in a directory")
    assert count > 500


# -- one part of one commit is damaged -------------------------------------------------


def damage(client: txnkv.Client, kind: int, id: int) -> int:
    """Change a byte of what the second commit changed in one part; answers its timestamp."""
    stamp, data = stored(client)[-2]
    (section,) = [s for s in payload.unpack(data, stamp) if (s.kind, s.id) == (kind, id)]
    at = data.index(section.data) + len(section.data) // 2
    put(client, stamp, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return stamp


@pytest.fixture(params=["before", "after"])
def flushed(request: pytest.FixtureRequest) -> Callable[[txnkv.Client], object]:
    """The loss is accepted before or after a flush that had to leave it out."""
    if request.param == "before":
        return lambda client: None
    return lambda client: internals.flush(client)


def test_a_damaged_commit_of_a_table(
    tmp_path: Path, flushed: Callable[[txnkv.Client], object]
) -> None:
    path = tmp_path / "store"
    make(path)
    with txnkv.connect(path, create=False) as client:
        right = answers(client)
        before = txnkv.Timestamp(stored(client)[-3][0])
        stamp = damage(client, payload.TABLET, client.table("a").info.tablets[0])
    with txnkv.connect(path, create=False) as client:
        table = client.table("a")
        found = answers(client)
        assert {name for name in found if found[name] != right[name]} == {"table 'a'"}
        assert [row["id"] for row in table.scan(snapshot=before)] == [0], (
            "older snapshots are whole"
        )
        flushed(client)
        client.table("b").get(0)
        with pytest.raises(txnkv.CorruptionError, match=r"^table 'a'.* --accept-loss table:a/0$"):
            table.count()
        with client.transaction() as txn:
            txn.insert("b", (10, "goes on"))
        assert any("table 'a'" in p or str(stamp) in p for p in client.check().problems)

        loss = client.accept_loss("table:a/0", dry_run=True)
        assert loss.commits == (stamp,)
        assert any(str(stamp) in line for line in loss.lines())
        assert not loss.rows
        with pytest.raises(txnkv.CorruptionError, match="table 'a'"):
            table.count()
        assert client.accept_loss("table:a/0").commits == (stamp,)

        assert [row["id"] for row in table.scan(ordered=True)] == [0, 2]
        with client.transaction() as txn:
            txn.insert("a", (1, "again"))
        internals.flush(client)
        assert client.check().ok, client.check().problems
    with txnkv.connect(path, create=False) as client:
        assert [row["id"] for row in client.table("a").scan(ordered=True)] == [0, 1, 2]
        assert client.check().ok


def test_a_damaged_commit_of_a_topic(
    tmp_path: Path, flushed: Callable[[txnkv.Client], object]
) -> None:
    path = tmp_path / "store"
    make(path)
    with txnkv.connect(path, create=False) as client:
        right = answers(client)
        (partition,) = client.topic("x").info.partitions
        damage(client, payload.TOPIC, partition)
    with txnkv.connect(path, create=False) as client:
        found = answers(client)
        assert {name for name in found if found[name] != right[name]} == {"topic 'x'"}
        flushed(client)
        rows, error = polled(client, "x")
        assert rows == [b"message 0"]
        assert error is not None
        assert "offset 1" in error

        loss = client.accept_loss("topic:x/0")
        assert loss.offsets == ((1, 2),)
        assert polled(client, "x") == ([b"message 0", b"message 2"], None)
        with client.transaction() as txn:
            txn.send("x", b"one more")
        internals.flush(client)
        assert client.check().ok, client.check().problems
    with txnkv.connect(path, create=False) as client:
        assert polled(client, "x") == ([b"message 0", b"message 2", b"one more"], None)


def test_a_process_that_is_open_hears_of_it(process: Callable[..., Any], store_path: Path) -> None:
    """It had taken the damage in, and reads on when another process has accepted the loss."""
    make(store_path)
    with txnkv.connect(store_path, create=False) as client:
        damage(client, payload.TABLET, client.table("a").info.tablets[0])
    other = process(
        """
        table = client.table("a")
        try:
            table.count()
        except txnkv.CorruptionError as error:
            say(str(error))
        wait()
        say([row["id"] for row in table.scan(ordered=True)])
        """
    )
    assert "table 'a'" in other.hear()
    with txnkv.connect(store_path, create=False) as client:
        try:
            client.accept_loss("table:a/0")
        except txnkv.UnavailableError as error:
            pytest.skip(str(error))
        assert client.table("a").count() == 2
    other.tell()
    assert other.finish() == [0, 2]
