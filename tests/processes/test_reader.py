"""A reader in another process never sees a part of a commit.

The writer commits transactions over 8 tablets of 2 tables, one after the other, and is killed
at random places and started again; the reader counts both tables in one snapshot, over and
over. Each transaction puts the same keys into both, so the counts are always equal, they
never shrink, and they are whole transactions.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tools.children import Child, ChildEndedError, Children
from tools.crash import leftovers, settle
from tools.crash_scenarios import BEFORE
from txnkv.storage import FAULT_POINTS

READER = """
client = txnkv.connect(args[0], create=False, read_only=args[1] == "read_only")
left, right = client.table("left"), client.table("right")
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
polls, seen = 0, [0]
say("ready")
while not ended.is_set():
    with client.snapshot() as snapshot:
        counts = left.count(snapshot=snapshot), right.count(snapshot=snapshot)
        rows_left = snapshot.scan("left", columns=["id"]).to_arrow().num_rows
        last = snapshot.get("right", 40 + 64 * ((counts[0] - 40) // 64) - 1)
    assert counts[0] == counts[1] == rows_left, (counts, rows_left)
    assert (counts[0] - 40) % 64 == 0, counts
    assert last is not None
    assert counts[0] >= seen[-1], (counts, seen)
    polls += 1
    if counts[0] != seen[-1]:
        seen.append(counts[0])
say(polls, len(seen))
"""

WRITER = """
cut_small()
client = txnkv.connect(args[0], create=False)
say("ready")
while True:
    with client.snapshot() as snapshot:
        first = snapshot.scan("left", columns=["id"]).to_arrow().num_rows
    with client.transaction() as txn:
        for name in TABLES:
            txn.write(name, rows(first, 64))
    say("committed", first + 64)
"""

POINTS = [
    name for name in FAULT_POINTS if name.split(".")[0] in ("commit", "stage", "lmdb", "status")
]


def say_lines(child: Child, into: list[str]) -> None:
    """Collect what a child says until it is dead."""
    assert child.popen.stdout is not None
    into.extend(line.strip() for line in child.popen.stdout)


def kill_at_random(children: Children, store: Path, chance: random.Random) -> list[str]:
    """One life of the writer: killed at a fault point, or at some moment."""
    point = chance.choice([*POINTS, None])
    fault = "" if point is None else f"{point}=kill@{chance.randint(1, 60)}"
    writer = children.start(WRITER, store, fault=fault)
    try:
        assert writer.line() == "ready"
    except ChildEndedError:
        return []
    said: list[str] = []
    listener = threading.Thread(target=say_lines, args=(writer, said))
    listener.start()
    listener.join(chance.uniform(0.3, 1.3))
    writer.popen.kill()
    listener.join()
    writer.popen.wait()
    return said


def run(children: Children, store: Path, seconds: float, mode: str, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    reader = children.start(READER, store, mode)
    assert reader.line() == "ready"
    end = time.monotonic() + seconds
    acknowledged = BEFORE
    lives = commits = 0
    while time.monotonic() < end or commits < 4 or lives < 2:
        said = kill_at_random(children, store, chance)
        lives += 1
        commits += len(said)
        acknowledged = max([acknowledged, *(int(line.split()[1]) for line in said)])
    polls, states = map(int, reader.finish()[-1].split())
    assert polls > 0
    with txnkv.connect(store, create=False) as client:
        settle(client)
        counts = [client.table(name).count() for name in ("left", "right")]
        assert counts[0] == counts[1] >= acknowledged
        assert leftovers(client) == []
        assert client.check().problems == []
    return lives, states


@pytest.mark.parametrize("mode", ["read_write", "read_only"])
def test_reader_sees_whole_transactions(mode: str, children: Children, store: Path) -> None:
    lives, states = run(children, store, 2, mode, seed=7)
    assert lives >= 2
    assert states >= 2, "the reader saw commits come"


@pytest.mark.slow
def test_reader_sees_whole_transactions_for_long(children: Children, store: Path) -> None:
    lives, _ = run(children, store, 180, "read_write", seed=random.randrange(1 << 30))
    assert lives > 20


PINNED = """
client = txnkv.connect(args[0], create=False)
with client.snapshot() as snapshot:
    before = snapshot.scan("left").to_arrow()
    say("pinned")
    wait()
    assert snapshot.scan("left").to_arrow().equals(before)
    assert client.table("left").count(snapshot=snapshot) == before.num_rows
say(client.table("left").count())
"""


def test_snapshot_of_another_process_stays_as_it_was(
    children: Children, store: Path, connect: Callable[..., txnkv.Client]
) -> None:
    reader = children.start(PINNED, store)
    assert reader.line() == "pinned"
    client = connect()
    with client.transaction() as txn:
        txn.insert("left", {"id": 1000, "text": "new"})
    reader.tell()
    assert reader.finish()[-1] == str(BEFORE + 1)
