"""Consumers that read while other processes write, flush and look after the store."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

import txnkv

_WRITER = """
import random
from txnkv.topics.write import append
from tools.topic_writers import abort, batch, begin, commit, send, small
engine = client.instance.topics
partitions = engine.partitions(engine.get("events"))
chance = random.Random(name)
done = []
open_ = []
for i in range(count):
    value = b"%s-%d" % (name, i)
    chosen = chance.sample(partitions, chance.randint(1, len(partitions)))
    what = chance.randint(0, 5)
    if what < 3:
        small(client, chosen, [value] * chance.randint(1, 3))
        done.append((value, {p.number for p in chosen}))
    elif what == 3:
        append.append_alone(engine, chosen[0], [batch([value])])
        done.append((value, {chosen[0].number}))
    else:
        row = begin(client)
        for partition in chosen:
            send(client, row, partition, [value] * 2)
        open_.append((row, value, {p.number for p in chosen}))
    if len(open_) > 2 or (open_ and i == count - 1):
        for row, value, numbers in [open_.pop(0)] if i < count - 1 else open_:
            if chance.random() < 0.2:
                abort(client, row)
            else:
                commit(client, row)
                done.append((value, numbers))
say(done)
"""


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_each_kind_of_reader_beside_writers(
    client: txnkv.Client, process: Any, buffer: str
) -> None:
    topic = client.create_topic("events", partitions=2, buffer=buffer)
    whole = topic.consumer("serializable")
    by_commit, by_offset = topic.consumer(order="commit"), topic.consumer()
    consumers = {whole: [], by_commit: [], by_offset: []}
    writers = [process(_WRITER, name=name, count=60) for name in (b"a", b"b")]
    rounds = 0
    while any(writer.popen.poll() is None for writer in writers) or rounds < 3:
        for consumer, seen in consumers.items():
            seen += consumer.poll(max_messages=7, timeout=0)
        rounds += 1
        if rounds % 50 == 0:
            client.compact()
    done = dict(pair for writer in writers for pair in writer.finish())
    for consumer, seen in consumers.items():
        while messages := consumer.poll(timeout=0):
            seen += messages

    expected = sorted((n, value) for value, numbers in done.items() for n in numbers)
    for seen in consumers.values():
        assert sorted({(m.partition, m.value) for m in seen}) == expected
        assert len({m.id for m in seen}) == len(seen)
    assert {m.id for m in consumers[whole]} == {m.id for m in consumers[by_offset]}
    assert {m.id for m in consumers[by_commit]} == {m.id for m in consumers[by_offset]}

    # Whole: one after the other, each with all its partitions.
    runs = [(value, list(run)) for value, run in groupby(consumers[whole], key=lambda m: m.value)]
    assert len(runs) == len({value for value, _ in runs}) == len(done)
    assert all({m.partition for m in run} == done[value] for value, run in runs)
    # A partition of it is that partition in commit order, and a new reader is given the same.
    for number in (0, 1):
        mine = [m.id for m in consumers[whole] if m.partition == number]
        assert mine == [m.id for m in consumers[by_commit] if m.partition == number]
    again = topic.consumer("serializable").poll(max_messages=10_000, timeout=0)
    assert [m.id for m in again] == [m.id for m in consumers[whole]]
    for number in (0, 1):
        offsets = [m.offset for m in consumers[by_offset] if m.partition == number]
        assert offsets == sorted(offsets)
