"""What must not come between: offsets of transactions, rounds of a group, unsure batches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import txnkv
from tests.kafka.test_groups import asking, running, until
from tests.kafka.test_requests import _add, _begin, _commit_offset, _end, _offset, _send
from tools.kafka_wire import Wire
from txnkv.client import group_members, live_members
from txnkv.errors import TransactionConflictError
from txnkv.kafka import KafkaServer
from txnkv.kafka.api_tables import Code
from txnkv.kafka.consumer_groups import ConsumerGroup
from txnkv.topics import outbox

Dial = Callable[[KafkaServer], Wire]


def test_offsets_of_a_producer_that_is_gone_are_free_again(
    store: txnkv.Client, wire: Wire, server: KafkaServer, dial: Dial
) -> None:
    """Its transaction ends by its timeout, or an admin, and its name never comes back: whoever
    reads for the group went on waiting for it, for ever.
    """
    store.create_topic("t")
    gone = dial(server)
    who = _begin(gone)
    assert gone.ask("AddOffsetsToTxn", **who, group_id="g")["error_code"] == 0
    assert _commit_offset(gone, who, 5) == 0
    gone.socket.close()
    assert _offset(wire) == (-1, Code.UNSTABLE_OFFSET_COMMIT)
    (open,) = [each for each in store.transactions() if each.state is txnkv.TxnState.OPEN]
    store.abort_transaction(open.id)
    assert _offset(wire) == (-1, 0)


def test_offsets_that_are_committed_while_they_are_read_are_not_those_of_before(
    store: txnkv.Client, wire: Wire, server: KafkaServer, dial: Dial, monkeypatch: Any
) -> None:
    """The rows say 5, EndTxn commits 7, nothing is open any more: so 5 was told to be stable, and
    who went on there did again what that transaction had done.
    """
    store.create_topic("t")
    who = _begin(wire)
    assert wire.ask("AddOffsetsToTxn", **who, group_id="g")["error_code"] == 0
    assert _commit_offset(wire, who, 7) == 0
    other = dial(server)
    table = type(server._broker.offsets)
    scan = table.scan

    def slowly(self: Any, *args: Any, **named: Any) -> Any:
        found = list(scan(self, *args, **named))
        monkeypatch.setattr(table, "scan", scan)
        assert _end(other, who, commit=True) == 0
        return found

    monkeypatch.setattr(table, "scan", slowly)
    assert _offset(wire) in ((7, 0), (-1, Code.UNSTABLE_OFFSET_COMMIT))
    assert _offset(wire) == (7, 0)


@pytest.mark.parametrize("late", [False, True])
def test_what_a_late_member_of_the_store_commits_is_refused(
    store: txnkv.Client, wire: Wire, late: bool
) -> None:
    """It is out, and a consumer of Kafka's goes on at the group's offset: what both did counted.
    The one that is not out is left alone.
    """
    topic, out = store.create_topic("t"), store.create_topic("out")
    store.run(lambda txn: txn.send(topic, b"a"))
    member = store.consumer(topic, group="g", max_poll_seconds=0.3 if late else 300)
    assert len(member.poll()) == 1
    open = store.new_transaction()
    open.send(out, b"done")
    member.commit(open)
    if late:
        until(lambda: not live_members(store, "g"))
    assert _offset(wire) == (0, 0)
    if late:
        with pytest.raises(TransactionConflictError):
            open.commit()
    else:
        open.commit()
    assert _offset(wire) == (0 if late else 1, 0)
    assert out.end_offsets()[0] == (0 if late else 1)
    member.close()


def test_a_member_that_renews_its_lease_during_a_look_is_not_out(
    store: txnkv.Client, wire: Wire, monkeypatch: Any
) -> None:
    """Its row was read before, its old lease looked up after: what it commits was refused."""
    topic = store.create_topic("t")
    store.run(lambda txn: txn.send(topic, b"a"))
    has_lease = group_members.has_lease
    with store.consumer(topic, group="g") as member:
        assert len(member.poll()) == 1
        open = store.new_transaction()
        member.commit(open)
        membership = member._membership

        def later(*args: Any) -> bool:
            monkeypatch.setattr(group_members, "has_lease", has_lease)
            membership._renewed = -1 << 60
            assert membership.renew()
            return has_lease(*args)

        monkeypatch.setattr(group_members, "has_lease", later)
        assert _offset(wire) == (0, 0)
        open.commit()
    assert _offset(wire) == (1, 0)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_commit_without_metadata_leaves_that_of_a_group_that_began_at_the_latest(
    store: txnkv.Client, wire: Wire, in_transaction: bool
) -> None:
    """It missed the messages of a partition that was added later."""
    topic = store.create_topic("t")
    store.run(lambda txn: txn.send(topic, b"before"))
    with store.consumer(topic, group="g", reset="latest") as member:
        assert member.poll(timeout=0) == []
    if in_transaction:
        who = _begin(wire)
        assert wire.ask("AddOffsetsToTxn", **who, group_id="g")["error_code"] == 0
        assert _commit_offset(wire, who, 1, metadata="") == 0
        assert _end(wire, who, commit=True) == 0
    else:
        told = {"partition_index": 0, "committed_offset": 1, "committed_metadata": None}
        nobody = {"group_id": "g", "generation_id_or_member_epoch": -1, "member_id": ""}
        wire.ask("OffsetCommit", **nobody, topics=[{"name": "t", "partitions": [told]}])
    topic.alter(partitions=2)
    store.run(lambda txn: txn.send(topic, b"added", partition=1))
    with store.consumer(topic, group="g", reset="latest") as member:
        assert [m.value for m in member.poll(timeout=0)] == [b"added"]


def test_a_batch_whose_append_was_unsure_counts_once(
    store: txnkv.Client, wire: Wire, monkeypatch: Any
) -> None:
    """It is in the log, and an error came after that: the producer sends it again."""
    topic = store.create_topic("t")
    who = _begin(wire)
    assert _add(wire, who) == 0
    send = outbox.send_open

    def unsure(*args: Any) -> Any:
        send(*args)
        raise txnkv.UnavailableError("the disk failed, too late")

    monkeypatch.setattr(outbox, "send_open", unsure)
    assert _send(wire, who, 0, b"once")["error_code"] == Code.REQUEST_TIMED_OUT
    monkeypatch.setattr(outbox, "send_open", send)
    assert _send(wire, who, 0, b"once")["base_offset"] == 0
    assert _send(wire, who, 1, b"next")["base_offset"] == 1
    assert _end(wire, who, commit=True) == 0
    assert [m.value for m in topic.consumer().poll(timeout=0)] == [b"once", b"next"]


@pytest.mark.parametrize("in_transaction", [False, True])
def test_no_round_is_over_while_offsets_of_the_one_before_are_written(in_transaction: bool) -> None:
    """A member may commit, a round gives its partition to another one, which reads offset 5, and
    only then its 7 is written: the other one had read 5 and 6 once more, or its 9 became 7.
    """
    group = ConsumerGroup("g")
    one, _ = group.join(asking("a"), running)
    group.sync(one, None, 1, {}, running)
    with ThreadPoolExecutor(2) as others:
        with group.committing(one, None, 1, in_transaction=in_transaction):
            rounds = [others.submit(group.join, asking("b"), running)]
            until(lambda: len(group.members) == 2)
            rounds.append(others.submit(group.join, asking("a", one), running))
            until(lambda: all(each.joined for each in group.members.values()))
            assert not any(each.done() for each in rounds)
            assert group.generation == 1
        assert [each.result(60)[1].generation for each in rounds] == [2, 2]


def test_offsets_are_written_inside_of_their_generation(
    store: txnkv.Client, wire: Wire, server: KafkaServer, dial: Dial, monkeypatch: Any
) -> None:
    store.create_topic("t")
    asked = {"group_id": "g", "protocol_type": "consumer"} | {
        "session_timeout_ms": 60_000, "rebalance_timeout_ms": 60_000,
        "protocols": [{"name": "range", "metadata": b""}],
    }  # fmt: skip
    id = wire.ask("JoinGroup", 3, **asked, member_id="")["member_id"]
    told = {"partition_index": 0, "committed_offset": 5, "committed_metadata": ""}
    group = server._broker.groups.get("g")
    seen: list[int] = []
    run = type(server._broker.client).run

    def slowly(self: Any, *args: Any, **named: Any) -> Any:
        with group.changed:
            seen.append(group.writing)
        return run(self, *args, **named)

    monkeypatch.setattr(type(server._broker.client), "run", slowly)
    shares = [{"member_id": id, "assignment": b"all"}]
    wire.ask("SyncGroup", 3, group_id="g", generation_id=1, member_id=id, assignments=shares)
    topics = [{"name": "t", "partitions": [told]}]
    member = {"group_id": "g", "generation_id_or_member_epoch": 1, "member_id": id}
    answer = wire.ask("OffsetCommit", **member, topics=topics)
    assert answer["topics"][0]["partitions"][0]["error_code"] == 0
    assert seen == [1]
    assert group.writing == 0
