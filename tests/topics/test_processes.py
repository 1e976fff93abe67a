"""Several processes append to one log, small and large, while others read it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.crash_topics import committed
from tools.topic_contents import stored
from tools.topic_writers import create

WRITERS = 3
ROUNDS = 12

WRITE = """
from tools.topic_writers import abort, begin, commit, send, small
engine = client.instance.topics
parts = [engine.partition(id) for id in ids]
sent = []
say("ready"); wait()
for i in range(rounds):
    name = b"%d %d " % (writer, i)
    if i % 3 == 0:
        sent.append((int(small(client, parts, [name + b"small"] * (1 + i % 2))), name + b"small"))
        continue
    row = begin(client)
    for n in range(2):
        for part in parts:
            send(client, row, part, [name + b"large"])
        if n == 0:
            small(client, parts[:1], [name + b"between"])
    if i % 3 == 1:
        sent.append((int(commit(client, row).commit_ts), name + b"large"))
    else:
        abort(client, row)
    if i == rounds // 2:
        client.instance.engine.flush()
say(sent)
"""

READ = """
from tools.crash_topics import committed
engine = client.instance.topics
part = engine.partition(id)
seen, looks = [], 0
say("ready"); wait()
while True:
    now = committed(client, part)
    assert now[:len(seen)] == seen, (seen, now)
    seen, looks = now, looks + 1
    if now and now[-1] == b"end":
        break
say((looks, len(seen)))
"""


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_offsets_are_dense_and_nothing_is_lost(
    client: txnkv.Client,
    process: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    buffer: str,
) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    monkeypatch.setenv("PYTHONPATH", root)
    parts = create(client, partitions=2, buffer=buffer)
    ids = [part.id for part in parts]
    writers = [process(WRITE, ids=ids, writer=number, rounds=ROUNDS) for number in range(WRITERS)]
    reader = process(READ, id=ids[0])
    for one in (*writers, reader):
        assert one.hear() == "ready"
    for one in (*writers, reader):
        one.tell()
    sent = [pair for writer in writers for pair in writer.hear()]
    for writer in writers:
        writer.finish()
    from tools.topic_writers import small

    small(client, parts[:1], [b"end"])
    looks, count = reader.hear()
    reader.finish()
    assert looks > 0

    for number, part in enumerate(parts):
        values = committed(client, part)
        for _, name in sent:
            assert name in values
        gone = {b"%d %d large" % (w, i) for w in range(WRITERS) for i in range(2, ROUNDS, 3)}
        assert not gone & set(values)
        order = [batch.header.commit_ts for batch in stored(client, "events", number)]
        decided = [stamp for stamp in order if stamp]
        assert decided == sorted(decided)
        with part.environment.read() as txn:
            assert part.log.end(txn) == internals.topics(client).look(part.id).next_offset
            assert part.log.open_transactions(txn) == []
            stamps = [entry.commit_ts for entry in part.log.commits(txn, 0, 10_000)]
        assert stamps == sorted(stamps)
        assert {stamp for stamp, _ in sent} <= set(stamps)
    assert count == len(committed(client, parts[0]))
