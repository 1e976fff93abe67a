"""`txnkv group`: subscriptions are listed, shown, moved and dropped."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

import txnkv
from txnkv.kafka.broker import Broker
from txnkv.topics.messages.message import MessageId


@pytest.fixture
def messages(store):
    """A topic `events` of two partitions, with 0, 1, 2 in each, and a subscription `s`, which has
    acknowledged 0:0.
    """
    with txnkv.connect(store) as client:
        events = client.create_topic("events", partitions=2)
        with client.transaction() as txn:
            for partition in (0, 1):
                for value in (b"0", b"1", b"2"):
                    txn.send(events, value, partition=partition)
        with events.subscribe("s", "shared", max_deliveries=5, lease_seconds=600) as sub:
            sub.ack(MessageId(0, 0))
    return store


def places(run, store):
    found = run("group", "show", store, "events", "s", "--json").json
    return [(each["committed"], each["lag"]) for each in found["partitions"]]


def test_list(messages, run):
    with txnkv.connect(messages) as client:
        events = client.topic("events")
        events.subscribe("alone").close()
        sub = events.subscribe("s", "shared")
        got = sub.receive_many(3, timeout=0)
        sub.nack(got[0])
        txn = client.new_transaction()
        txn.ack(sub, got[1])
        alone, shared = run("group", "list", messages, "events", "--json").json
        held = {"leased": 1, "free": 1, "delayed": 0, "pending": 1, "kept": 0, "members": None}
        assert (
            shared
            == {"topic": "events", "name": "s", "type": "shared", "lag": 5, "lost": 0}
            | {"consumer_pid": None}
            | held
        )
        assert (alone["type"], alone["lag"]) == ("exclusive", 6)
        lines = run("group", "list", messages, "events").out.splitlines()
        assert lines[-1].split() == ["s", "shared", "5", "1", "1", "0", "1"]
        txn.rollback()


def test_list_of_all_topics(messages, run):
    with txnkv.connect(messages) as client:
        client.topic("events").subscribe("s", "shared").close()
        client.create_topic("another").subscribe("s").close()
        found = run("group", "list", messages, "--json").json
    assert [(each["topic"], each["name"], each["type"]) for each in found] == [
        ("another", "s", "exclusive"),
        ("events", "s", "shared"),
    ]
    lines = [line.split()[:3] for line in run("group", "list", messages).out.splitlines()]
    assert lines[0] == ["topic", "name", "type"]
    assert lines[-2:] == [["another", "s", "exclusive"], ["events", "s", "shared"]]


def test_consumer_groups_are_listed_too(messages, run):
    with txnkv.connect(messages) as client:
        broker = Broker(messages, None)
        for group, partition, offset in (("g", 0, 1), ("g", 1, 9), ("f", 1, 0)):
            now = datetime.now(UTC)
            broker.offsets.upsert((group, "events", partition, offset, None, now, None, None))
        broker.offsets.upsert(("h", "another", 0, 0, None, now, None, None))
        broker.close()
        client.topic("events").subscribe("alone").close()
        found = run("group", "list", messages, "events", "--json").json
        groups = [(each["name"], each["lag"]) for each in found if each["type"] == "group"]
        assert groups == [("f", 3), ("g", 2)]
        assert {frozenset(each) for each in found} == {frozenset(found[0])}
        lines = run("group", "list", messages, "events").out.splitlines()
        assert lines[-1].endswith(" 0 members, Kafka's not counted")
        with client.consumer("events", group="g") as member:
            member.poll(timeout=0)
            lines = run("group", "list", messages, "events").out.splitlines()
            assert lines[-1].split() == ["g", "group", "2", "0", "0", "0", "0", "1", "member"]


def test_a_line_of_the_list_is_one_of_a_name(messages, run):
    with txnkv.connect(messages) as client:
        client.topic("events").subscribe("a\nb\tc").close()
    assert r"a\nb\tc   exclusive" in run("group", "list", messages, "events").out


def test_a_consumer_group_is_shown_moved_and_dropped(messages, run, invoke):
    where = (messages, "events", "g")
    with txnkv.connect(messages) as client:
        with client.consumer("events", group="g") as member:
            assert len(member.poll(timeout=0)) == 6
            member.commit()
            shown = run("group", "show", *where, "--json").json
            (one,) = shown["members"]
            assert one["process"].endswith(f":{os.getpid()}")
            assert shown["partitions"] == [
                {"partition": number, "committed": 3, "lag": 0, "member": one["member"]}
                for number in range(2)
            ]
            out = run("group", "show", *where).out
            assert one["process"] in out
            assert "committed" in out
            assert "Kafka" not in out
            assert invoke("group", "drop", *where).status == 1
            moved = run("group", "seek", *where, "--to", "1", "-p", "1", "--json")
            assert (moved.json["committed"], moved.err) == ([3, 1], "")
            member._next_look = 0
            assert [message.id for message in member.poll(timeout=0)] == [(1, 1), (1, 2)]
        assert "ends at 3" in invoke("group", "seek", *where, "--to", "9", "-p", "1").err
        assert "those that are Kafka's clients are not known" in run("group", "show", *where).out
        moved = run("group", "seek", *where, "--to", "earliest")
        assert moved.out == "moved g: partition 0 at 0, 1 at 0\n"
        assert "Kafka's clients are not known here: stop them first" in moved.err
        dropped = run("group", "drop", *where)
        assert (dropped.out, dropped.err) == ("dropped g\n", moved.err)
        assert client.table("kafka_offsets").count() == 0
        assert "no subscription or group 'g'" in invoke("group", "show", *where).err


def test_show_tells_who_has_which_message(messages, run):
    with txnkv.connect(messages) as client:
        sub = client.topic("events").subscribe("s", "shared")
        got = {m.id: m for m in sub.receive_many(9, timeout=0)}
        sub.nack(got[0, 1])
        txn = client.new_transaction()
        txn.ack(sub, [got[1, 0], got[1, 1]])
        found = run("group", "show", messages, "events", "s", "--json").json
        assert (found["max_deliveries"], found["lease_seconds"]) == (5, 600)
        held = {(each["partition"], each["first"], each["state"]): each for each in found["held"]}
        assert sorted(held) == [
            (0, 1, "free"), (0, 2, "leased"), (1, 0, "pending"), (1, 2, "leased")
        ]  # fmt: skip
        leased, pending = held[0, 2, "leased"], held[1, 0, "pending"]
        assert (leased["pid"], leased["deliveries"]) == (os.getpid(), 1)
        assert 0 < leased["seconds_left"] <= 600
        assert (pending["transaction"], pending["last"]) == (txn.id.local, 1)
        out = run("group", "show", messages, "events", "s").out
        assert f"process {os.getpid()}" in out
        assert f"transaction {txn.id.local}" in out
        assert "0 to 1" in out
        txn.rollback()


def test_show_tells_the_consumer(messages, run):
    with txnkv.connect(messages) as client, client.topic("events").subscribe("alone"):
        found = run("group", "show", messages, "events", "alone", "--json").json
        assert found["consumer_pid"] == os.getpid()
        assert found["held"] == []


@pytest.mark.parametrize(
    ("args", "after"),
    [
        (["--to", "earliest"], [(0, 3), (0, 3)]),
        (["--to", "latest"], [(3, 0), (3, 0)]),
        (["--to", "latest", "-p", 1], [(1, 2), (3, 0)]),
        (["--to", 2, "-p", 0, "-p", 1], [(2, 1), (2, 1)]),
    ],
)
def test_seek(messages, run, args, after):
    assert places(run, messages) == [(1, 2), (0, 3)]
    out = run("group", "seek", messages, "events", "s", *args).out
    assert out.startswith("moved s: partition ")
    assert places(run, messages) == after
    json = run("group", "seek", messages, "events", "s", *args, "--json").json
    assert json == {"name": "s", "committed": [place for place, _ in after]}


def test_seek_refused(messages, run, fail, misuse):
    def seek(*args):
        return ("group", "seek", messages, "events", "s", *args)

    assert "offset 9" in fail(*seek("--to", 9, "-p", 0))
    assert "--to is earliest" in misuse(*seek("--to", "now"))
    assert "-p" in misuse(*seek("--to", 1))
    assert "2 partitions" in misuse(*seek("--to", "latest", "-p", 2))
    assert "--to" in misuse(*seek())
    with txnkv.connect(messages) as client:
        events = client.topic("events")
        sub, txn = events.subscribe("s", "shared"), client.new_transaction()
        txn.ack(sub, MessageId(0, 1))
        assert "pending" in fail(*seek("--to", "latest"))
        txn.rollback()
        with events.subscribe("alone"):
            assert "has a consumer" in fail(
                "group", "seek", messages, "events", "alone", "--to", "latest"
            )
    assert places(run, messages) == [(1, 2), (0, 3)]


def test_drop(messages, run):
    assert run("group", "drop", messages, "events", "s").out == "dropped s\n"
    with txnkv.connect(messages) as client:
        client.topic("events").subscribe("t").close()
    assert run("group", "drop", messages, "events", "t", "--json").json == {"dropped": "t"}
    assert run("group", "list", messages, "events").out == "no subscriptions\n"
    assert run("group", "list", messages, "events", "--json").json == []


@pytest.mark.parametrize("command", [["show"], ["seek", "--to", "latest"], ["drop"]])
def test_an_unknown_one_is_told(messages, fail, command):
    told = fail("group", *command, messages, "events", "x")
    assert "no subscription or group 'x'" in told
    assert "s" in told
    assert "there is no topic 'y'" in fail("group", *command, messages, "y", "s")
