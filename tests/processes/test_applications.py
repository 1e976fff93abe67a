"""Drivers of one application in several processes: each version is committed by one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tools.children import Children
from tools.crash import leftovers, settle

Connect = Callable[..., txnkv.Client]

VERSIONS = 60

DRIVER = """
client = txnkv.connect(args[0], create=False)
me, kind, upto = int(args[1]), args[2], int(args[3])
say("ready")
wait()
won = lost = 0
while True:
    found = client.applied("daily")
    version = 0 if found is None else found.version + 1
    if version == upto:
        break
    txn = client.new_transaction()
    if kind == "stored" or (kind == "mixed" and version % 2):
        txn.serialize()
    txn.insert("versions", (version * 10 + me, me))
    txn.send("versions", f"{version}")
    try:
        txn.mark_applied("daily", version)
        txn.commit()
        won += 1
        say("applied", version)
    except txnkv.AlreadyAppliedError:
        lost += 1
say("won", won, "lost", lost)
"""


@pytest.fixture
def path(store: Path, connect: Connect) -> Path:
    client = connect()
    schema = txnkv.Schema({"id": "int64", "by": "int64"}, primary_key=["id"])
    client.create_table("versions", schema)
    client.create_topic("versions")
    return store


def committed(client: txnkv.Client) -> tuple[list[int], list[int]]:
    """The versions by their rows, and by their messages."""
    rows = [row["id"] // 10 for row in client.table("versions").scan(ordered=True)]
    with client.topic("versions").consumer() as consumer:
        values = [message.value for message in consumer.poll(max_messages=10_000, timeout=0)]
    return rows, [int(value or b"") for value in values]


@pytest.mark.parametrize("kinds", [("small", "small"), ("stored", "stored"), ("mixed", "small")])
def test_two_drivers_race(
    children: Children, path: Path, connect: Connect, kinds: tuple[str, str]
) -> None:
    both = [children.start(DRIVER, path, me, kind, VERSIONS) for me, kind in enumerate(kinds)]
    for child in both:
        assert child.line() == "ready"
    for child in both:
        child.tell()
    said = [child.finish() for child in both]
    told = sorted(int(line.split()[1]) for lines in said for line in lines[:-1])
    assert told == list(range(VERSIONS))
    client = connect()
    assert committed(client) == (list(range(VERSIONS)), list(range(VERSIONS)))
    assert leftovers(client) == []


@pytest.mark.parametrize("kind", ["small", "stored"])
def test_a_driver_is_killed_again_and_again(
    children: Children, path: Path, connect: Connect, kind: str
) -> None:
    """Its successor goes on where it was: what it had begun is a version, or nothing."""
    for number in range(3):
        fault = f"status.{('before', 'after')[number % 2]}_commit=kill@{5 + 6 * number}"
        child = children.start(DRIVER, path, 0, kind, VERSIONS, fault=fault)
        assert child.line() == "ready"
        child.tell()
        child.finish(-9)
    last = children.start(DRIVER, path, 0, kind, VERSIONS)
    assert last.line() == "ready"
    last.tell()
    last.finish()
    client = connect()
    settle(client)
    assert committed(client) == (list(range(VERSIONS)), list(range(VERSIONS)))
    assert leftovers(client) == []


def test_a_driver_that_was_stopped_comes_too_late(
    children: Children, path: Path, connect: Connect
) -> None:
    """Its transaction is still open, and another one has committed its version meanwhile."""
    child = children.start(
        """
        client = txnkv.connect(args[0], create=False)
        txn = client.new_transaction(timeout=None)
        txn.insert("versions", (0, 0))
        txn.serialize()
        txn.mark_applied("daily", 0)
        say("marked")
        wait()
        try:
            txn.commit()
        except txnkv.AlreadyAppliedError as error:
            say(txn.state.name)
        """,
        path,
    )
    assert child.line() == "marked"
    client = connect()
    with client.transaction() as txn:
        txn.insert("versions", (1, 1))
        txn.mark_applied("daily", 0)
    child.tell()
    assert child.finish() == ["ABORTED"]
    assert [row["id"] for row in client.table("versions").scan()] == [1]
