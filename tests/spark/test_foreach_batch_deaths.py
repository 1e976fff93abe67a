"""Drivers of micro batches that die in their commits, one after the other; without Spark.

What a query does is small here: a batch is five messages of a topic, and the note that it is done
is a file, written when the function has returned. So every step of txnkv can be died at, and the
note is behind the store, as Spark's checkpoint is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import txnkv
from tools.children import Children
from tools.crash import leftovers, settle

BATCHES = 24
SIZE = 5

DRIVER = """
from pathlib import Path
from types import SimpleNamespace
from txnkv.spark import foreach_batch, query_progress

path, note, size, upto = args[0], Path(args[1]), int(args[2]), int(args[3])

class Frame:
    def __init__(self):
        context = SimpleNamespace(getLocalProperty=lambda name: "query")
        self.sparkSession = SimpleNamespace(sparkContext=context)
        self.write = self
    def format(self, name):
        return self
    def mode(self, name):
        return self
    def save(self):
        say("skipped", int(note.read_text()))

def end_offsets(frame, batch_id):
    ends = {"0": (batch_id + 1) * size}
    return [{"topic": "in", "id": topic, "order": "offset", "offsets": ends}]

def fn(frame, batch_id, txn):
    if batch_id % 3:
        txn.serialize()
    txn.insert("done", (batch_id,))
    txn.send("out", str(batch_id))

with txnkv.connect(path, create=False) as client:
    topic = client.topic("in").info.id
query_progress.end_offsets = end_offsets
query_progress.checkpoint_of = lambda frame: None
do = foreach_batch(path, fn, "daily", "reader")
while (batch_id := int(note.read_text())) < upto:
    do(Frame(), batch_id)
    note.write_text(str(batch_id + 1))
"""


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as some:
        yield some


@pytest.mark.parametrize("point", ["status.before_commit", "status.after_commit"])
def test_each_batch_is_done_once(
    client: txnkv.Client, children: Children, tmp_path: Path, point: str
) -> None:
    topic = client.create_topic("in")
    client.create_topic("out")
    client.create_table("done", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with client.transaction() as txn:
        for i in range(BATCHES * SIZE):
            txn.send(topic, str(i))
    note = tmp_path / "note"
    note.write_text("0")
    skipped = []
    for number in [*range(9, 33, 6), 0]:
        fault = f"{point}=kill@{number}" if number else ""
        child = children.start(DRIVER, client.path, note, SIZE, BATCHES, fault=fault)
        said = child.finish(-9 if number else 0)
        skipped += [int(line.split()[1]) for line in said]
        done = [row["id"] for row in client.table("done").scan(ordered=True)]
        assert done == list(range(len(done)))
        assert int(note.read_text()) <= len(done)
    assert len(done) == BATCHES
    assert len(skipped) == len(set(skipped))
    with client.topic("out").consumer() as consumer:
        values = [int(m.value or b"") for m in consumer.poll(max_messages=1000, timeout=0)]
    assert values == done
    with topic.subscribe("reader") as subscription:
        assert subscription.receive(timeout=0) is None
    settle(client)
    assert leftovers(client) == []
