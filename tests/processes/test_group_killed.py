"""Members of a group are killed at random: every message is handled once, in its partition's order.

The effect of a message is a row of a table, in the transaction that commits the position behind it;
the row numbers those of its partition, so that what was lost, came twice or too early shows.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import txnkv
from tools.forked import Popen
from txnkv.errors import TransactionConflictError

PARTITIONS, MESSAGES = 6, 500

MEMBER = """
import random, sys
import txnkv
from txnkv.client import group_consumer
from txnkv.errors import TransactionConflictError

group_consumer._SETTLED, group_consumer._UNSETTLED = 50_000, 10_000
client = txnkv.connect(sys.argv[1], keepalive_time=0.5)
effects, last = client.table("effects"), client.table("last")


def handle(txn):
    member.commit(txn)
    for message in found:
        row = txn.get(last, message.partition) or {"offset": -1, "count": 0}
        assert row["offset"] < message.offset, (row, message)
        txn.upsert(last, (message.partition, message.offset, row["count"] + 1))
        txn.insert(effects, (message.partition, message.offset, row["count"], message.raw))


with client.consumer("t", group="g") as member:
    while True:
        try:
            found = member.poll(max_messages=random.randint(1, 9), timeout=0.2)
            if found:
                client.run(handle)
        except TransactionConflictError:
            pass
"""


def test_every_message_is_handled_once(tmp_path: Path) -> None:
    store, chance = tmp_path / "store", random.Random(5)
    client = txnkv.connect(store, keepalive_time=0.5)
    topic = client.create_topic("t", partitions=PARTITIONS)
    columns = {"partition": "int32", "offset": "int64", "count": "int64", "value": "binary"}
    client.create_table("effects", txnkv.Schema(columns, primary_key=["partition", "offset"]))
    kept = {name: columns[name] for name in ("partition", "offset", "count")}
    client.create_table("last", txnkv.Schema(kept, primary_key=["partition"]))

    def start() -> Popen:
        return Popen([sys.executable, "-c", MEMBER, str(store)])

    members = [start() for _ in range(3)]
    sent: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    try:
        for number in range(0, MESSAGES, 20):
            with client.transaction() as txn:
                for at in range(number, number + 20):
                    partition = chance.randrange(PARTITIONS)
                    sent[partition].append(b"%d" % at)
                    txn.send(topic, b"%d" % at, partition=partition)
            if chance.random() < 0.15:
                dies = members.pop(chance.randrange(len(members)))
                dies.kill()
                dies.wait()
                members.append(start())
            time.sleep(0.02)
        give_up = time.monotonic() + 120
        while client.table("effects").count() < MESSAGES:
            assert time.monotonic() < give_up, client.table("effects").count()
            assert all(each.poll() is None for each in members)
            time.sleep(0.1)
    finally:
        for each in members:
            each.kill()
            each.wait()
    for partition, values in enumerate(sent):
        where = [("partition", "=", partition)]
        rows = list(client.table("effects").scan(where=where, ordered=True))
        assert [row["value"] for row in rows] == values
        assert [row["count"] for row in rows] == list(range(len(values)))
    with client.consumer("t", group="g") as late:
        give_up = time.monotonic() + 60
        while len(late.partitions) < PARTITIONS:  # the killed ones are out by then
            assert time.monotonic() < give_up
            try:
                assert late.poll(timeout=0.1) == []
            except TransactionConflictError:
                raise AssertionError("it was given something") from None
        assert late.lag() == 0
    assert client.check().problems == []
    client.close()
