"""Members of a group: shares of partitions, handovers, positions that are committed and fenced."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import txnkv
from txnkv.client import MEMBERS_TABLE, OFFSETS_TABLE, group_consumer
from txnkv.client.group_consumer import GroupConsumer, share
from txnkv.errors import (
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
    TransactionConflictError,
)

Connect = Callable[..., txnkv.Client]


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poll looks at the rows."""
    monkeypatch.setattr(group_consumer, "_SETTLED", 0)
    monkeypatch.setattr(group_consumer, "_UNSETTLED", 0)


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    """Three messages in each of four partitions."""
    made = client.create_topic("t", partitions=4)
    send(client, 3)
    return made


@pytest.fixture
def member(client: txnkv.Client, topic: txnkv.Topic) -> Iterator[Callable[..., GroupConsumer]]:
    """Makes members of group g."""
    made: list[GroupConsumer] = []

    def join(**options: Any) -> GroupConsumer:
        made.append(client.consumer("t", group="g", **options))
        return made[-1]

    yield join
    for each in made:
        each.close()


def send(client: txnkv.Client, count: int, partitions: int = 4) -> None:
    with client.new_session() as session:
        for number in range(partitions):
            for at in range(count):
                session.send("t", f"{number}.{at}", partition=number)


def given(consumer: GroupConsumer) -> dict[int, list[int]]:
    """Offsets of what a poll gives, by partition."""
    found: dict[int, list[int]] = {}
    for message in consumer.poll(timeout=0):
        found.setdefault(message.partition, []).append(message.offset)
    return found


def commit(client: txnkv.Client, *consumers: GroupConsumer) -> None:
    for consumer in consumers:
        with client.transaction() as txn:
            consumer.commit(txn)


def die(client: txnkv.Client, consumer: GroupConsumer) -> None:
    """End its lease, as its keepalive time does when its process is gone."""
    lease = consumer._membership._lease
    assert lease is not None
    client.abort_transaction(lease.id)


ALL = {number: [0, 1, 2] for number in range(4)}


def test_shares_are_in_order_and_alike() -> None:
    assert share([3, 5, 9], 8) == {3: range(3), 5: range(3, 6), 9: range(6, 8)}
    assert share([3, 5, 9], 2) == {3: range(1), 5: range(1, 2), 9: range(2, 2)}
    for members in range(1, 9):
        for partitions in range(20):
            shares = share(range(members), partitions)
            assert [n for each in shares.values() for n in each] == list(range(partitions))
            assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1


def test_what_is_committed_is_handed_over(client: txnkv.Client, member: Any) -> None:
    one = member()
    assert given(one) == ALL
    two = member()
    assert given(two) == {}
    assert one.poll(timeout=0) == []  # 2 and 3 are to go, and what was given is not committed
    assert (one.partitions, given(two), two.partitions) == ([0, 1], {}, [])
    commit(client, one)
    assert (given(one), given(two)) == ({}, {})
    assert (one.partitions, two.partitions) == ([0, 1], [2, 3])
    assert two.committed() == {0: 3, 1: 3, 2: 3, 3: 3}
    assert (two.position(2), two.lag()) == (3, 0)
    send(client, 1)
    assert two.lag() == 2
    assert (given(one), given(two)) == ({0: [3], 1: [3]}, {2: [3], 3: [3]})
    one.close()
    assert two.partitions == [2, 3]
    assert given(two) == {0: [3], 1: [3]}  # that one had them, and did not commit
    two.close()
    assert list(client.table(MEMBERS_TABLE).scan()) == []
    assert {row["member"] for row in client.table(OFFSETS_TABLE).scan()} == {None}
    assert [each for each in client.transactions() if each.state is txnkv.TxnState.OPEN] == []


def test_partitions_that_nothing_was_given_of_go_at_once(member: Any) -> None:
    one = member()
    assert one.poll(max_messages=1, timeout=0)[0].partition == 0
    two = member()
    two.poll(timeout=0)
    one.poll(max_messages=1, timeout=0)
    assert given(two) == {2: [0, 1, 2], 3: [0, 1, 2]}


def test_who_does_not_commit_keeps_a_partition_for_a_while(
    client: txnkv.Client, member: Any, now: Any
) -> None:
    one = member()
    assert given(one) == ALL
    two = member()
    two.poll(timeout=0)
    one.poll(timeout=0)
    now.forward(client.keepalive_time + 1)
    with pytest.raises(TransactionConflictError, match="partition 2, 3 went to another"):
        one.poll(timeout=0)
    assert given(two) == {2: [0, 1, 2], 3: [0, 1, 2]}
    assert given(one) == {0: [0, 1, 2], 1: [0, 1, 2]}  # all that was not committed
    commit(client, one, two)
    assert one.committed() == dict.fromkeys(range(4), 3)


def test_a_commit_and_a_handover_are_one_after_the_other(client: txnkv.Client, member: Any) -> None:
    one = member()
    assert given(one) == ALL
    late = client.new_transaction()
    one.commit(late)
    die(client, one)
    two = member()
    assert given(two) == ALL
    with pytest.raises(TransactionConflictError):
        late.commit()
    commit(client, two)
    for retriable in (True, False):
        with client.new_transaction() as txn:
            with pytest.raises(TransactionConflictError, match="another member") as caught:
                one.commit(txn)
            assert caught.value.retriable is retriable
            txn.rollback()
    assert given(one) == {}  # it has joined anew
    assert given(two) == {}
    assert (given(one), one.partitions, two.partitions) == ({}, [2, 3], [0, 1])
    commit(client, one, two)


def test_a_member_that_lost_what_it_was_given_is_told_at_its_poll(
    client: txnkv.Client, member: Any
) -> None:
    one = member()
    assert given(one) == ALL
    die(client, one)
    assert given(one) == {}  # it is another member now, and has them all again
    commit(client, one)
    send(client, 1)
    assert given(one) == {n: [3] for n in range(4)}
    die(client, one)
    with client.consumer("t", group="g") as two:
        assert given(two) == {n: [3] for n in range(4)}
        with pytest.raises(TransactionConflictError, match="0, 1, 2, 3") as caught:
            one.poll(timeout=0)
        assert caught.value.retriable
        commit(client, two)
    assert given(one) == {}
    assert one.committed() == dict.fromkeys(range(4), 4)


def test_an_attempt_that_failed_is_given_again(client: txnkv.Client, member: Any) -> None:
    one = member()
    assert given(one) == ALL
    with client.new_transaction() as txn:
        one.commit(txn)
        txn.rollback()
    assert one.committed() == dict.fromkeys(range(4), 0)
    assert given(one) == ALL
    for _ in range(2):  # attempts of the same messages
        txn = client.new_transaction()
        one.commit(txn)
        txn.rollback()
    commit(client, one)
    assert given(one) == {}
    send(client, 1)
    assert given(one) == {n: [3] for n in range(4)}
    one.rewind()
    assert given(one) == {n: [3] for n in range(4)}
    one.commit()
    assert one.committed() == dict.fromkeys(range(4), 4)


def test_nothing_is_committed_over_an_attempt_that_failed(
    client: txnkv.Client, member: Any
) -> None:
    one = member()
    assert given(one) == ALL
    first = client.new_transaction()
    one.commit(first)
    send(client, 1)
    assert given(one) == {n: [3] for n in range(4)}
    first.rollback()
    with client.new_transaction() as second:
        for retriable in (True, False):
            with pytest.raises(TransactionConflictError, match="had messages whose") as refused:
                one.commit(second)
            assert refused.value.retriable is retriable
        second.rollback()
    assert given(one) == {n: [0, 1, 2, 3] for n in range(4)}
    commit(client, one)
    send(client, 1)
    assert given(one) == {n: [4] for n in range(4)}
    one.commit()  # that one is in front of it no more


def test_a_transaction_that_holds_its_positions_does_not_keep_a_member(
    client: txnkv.Client, member: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(group_consumer, "_LEAVING", 0.1)
    one = member()
    assert given(one) == ALL
    with client.new_transaction(locking="partition") as txn:
        one.commit(txn)
        txn.flush()
        one.close()
        txn.rollback()
    assert given(member()) == ALL


def test_transactions_that_are_open_beside_each_other_commit_in_turn(
    client: txnkv.Client, member: Any
) -> None:
    one = member()
    assert given(one) == ALL
    first = client.new_transaction()
    one.commit(first)
    send(client, 1)
    assert given(one) == {n: [3] for n in range(4)}
    second = client.new_transaction()
    with pytest.raises(TransactionConflictError):
        one.commit(second)  # its snapshot has not the first one's positions
    second.rollback()
    first.commit()
    assert given(one) == {n: [3] for n in range(4)}  # again, for that attempt failed
    commit(client, one)
    assert one.committed() == dict.fromkeys(range(4), 4)


def test_a_run_is_repeated_where_that_helps(client: txnkv.Client, member: Any) -> None:
    effects = client.create_table("e", txnkv.Schema({"at": "string"}, primary_key=["at"]))
    one = member()
    found = one.poll(timeout=0)
    tries = []

    def handle(txn: txnkv.Transaction) -> None:
        tries.append(txn)
        for message in found:
            txn.insert(effects, (f"{message.partition}.{message.offset}",))
        one.commit(txn)
        if len(tries) == 1:
            client.table(OFFSETS_TABLE).upsert({**row, "metadata": "another"})

    row = client.table(OFFSETS_TABLE).get(("g", "t", 0))
    assert row is not None
    client.run(handle)
    assert (len(tries), effects.count(), given(one)) == (2, 12, {})


def test_a_run_that_polls_is_given_the_same_again(client: txnkv.Client, member: Any) -> None:
    """A transaction that is older than the handover is refused once, and loses nothing."""
    effects = client.create_table("e", txnkv.Schema({"at": "string"}, primary_key=["at"]))
    one = member()
    tries = []

    def handle(txn: txnkv.Transaction) -> None:
        tries.append(int(txn.id))
        for message in one.poll(timeout=0):  # its partitions become its own in here
            txn.insert(effects, (f"{message.partition}.{message.offset}",))
        one.commit(txn)

    client.run(handle)
    assert (len(tries), effects.count(), given(one)) == (2, 12, {})
    client.run(handle)  # nothing was given
    send(client, 1)
    client.run(handle)
    assert (effects.count(), one.committed()) == (16, dict.fromkeys(range(4), 4))


def test_a_position_that_others_move_counts(client: txnkv.Client, member: Any) -> None:
    one = member()
    assert given(one) == ALL
    commit(client, one)
    row = client.table(OFFSETS_TABLE).get(("g", "t", 2))
    assert row is not None
    client.table(OFFSETS_TABLE).upsert({**row, "offset": 1})
    assert given(one) == {2: [1, 2]}
    client.table(OFFSETS_TABLE).upsert({**row, "offset": 2})
    with client.new_transaction() as txn:
        with pytest.raises(TransactionConflictError):
            one.commit(txn)
        txn.rollback()
    assert given(one) == {2: [2]}
    one.seek(2, 0)
    assert given(one) == {2: [0, 1, 2]}
    one.seek(3, 1)
    one.commit()
    assert one.committed() == {0: 3, 1: 3, 2: 3, 3: 1}


def test_resets(client: txnkv.Client, topic: txnkv.Topic, member: Any, caplog: Any) -> None:
    late = client.consumer(topic, group="late", reset="latest")
    assert given(late) == {}
    late.close()  # and nothing that comes meanwhile is missed
    never = client.consumer(topic, group="never", reset="none")
    with pytest.raises(OffsetOutOfRangeError, match="'never' has no position"):
        never.poll(timeout=0)
    never.close()
    send(client, 1)
    one = member()
    assert given(one) == {n: [0, 1, 2, 3] for n in range(4)}
    one.close()
    topic.truncate("latest")
    send(client, 1)
    with client.consumer(topic, group="late", reset="latest") as late:
        with caplog.at_level(logging.WARNING, logger="txnkv"):
            assert given(late) == {}
        assert "offset 3 of partition 0 of topic 't' is not in the log" in caplog.text
        assert late.position(0) == 5
    strict = client.consumer(topic, group="g", reset="none")
    with strict, pytest.raises(OffsetOutOfRangeError):
        strict.poll(timeout=0)
    assert given(member()) == {n: [4] for n in range(4)}


def test_a_position_is_not_behind_the_end(client: txnkv.Client, member: Any) -> None:
    one = member()
    one.poll(timeout=0)
    with pytest.raises(OffsetOutOfRangeError, match="asked for offset 4 and ends at 3"):
        one.seek(1, 4)
    one.seek(1, 3)
    one.commit()
    assert one.committed()[1] == 3


def test_what_retention_took_is_passed_in_the_same_poll(
    client: txnkv.Client, topic: txnkv.Topic, member: Any
) -> None:
    one = member()
    assert len(one.poll(max_messages=1, timeout=0)) == 1
    one.commit()
    topic.truncate(dict.fromkeys(range(4), 2))
    assert given(one) == {number: [2] for number in range(4)}


def test_partitions_that_are_added_are_shared(
    client: txnkv.Client, topic: txnkv.Topic, member: Any
) -> None:
    one, two = member(), member()
    assert [list(given(each)) for each in (one, two)] == [[0, 1], [2, 3]]
    commit(client, one, two)
    topic.alter(partitions=6)
    send(client, 1, partitions=6)
    for each in (one, two, one, two):
        each.poll(timeout=0)
        commit(client, each)
    assert (one.partitions, two.partitions) == ([0, 1, 2], [3, 4, 5])
    assert one.committed() == {0: 4, 1: 4, 2: 4, 3: 4, 4: 1, 5: 1}


def test_partitions_that_are_added_are_read_from_their_beginning(
    client: txnkv.Client, topic: txnkv.Topic, until: Any
) -> None:
    """Also by a group that began at the latest, whoever of its members has them first."""
    one = client.consumer(topic, group="late", reset="latest")
    assert given(one) == {}
    with client.consumer(topic, group="late", reset="latest") as two:
        until(lambda: given(one) == given(two) == {} and two.partitions == [2, 3])
        topic.alter(partitions=6)
        send(client, 1, partitions=6)
        found: dict[int, list[int]] = {}

        def more() -> bool:
            for each in (one, two):
                found.update(given(each))
                commit(client, each)
            return len(found) == 6

        until(more)
        assert found == {0: [3], 1: [3], 2: [3], 3: [3], 4: [0], 5: [0]}
    one.close()


def test_a_group_with_some_positions_has_its_reset_for_the_others(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    """Those of Kafka's clients commit only what they consumed of; that says nothing of the rest."""
    with client.consumer(topic, group="late", reset="latest") as first:
        assert given(first) == {}
    offsets = client.table("kafka_offsets")
    for number in (1, 3):
        offsets.delete(("late", "t", number))
    for number in (0, 2):
        offsets.update({"group": "late", "topic": "t", "partition": number, "metadata": ""})
    with client.consumer(topic, group="late", reset="latest") as again:
        assert given(again) == {}
        assert again.committed() == {0: 3, 1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize("name", [OFFSETS_TABLE, MEMBERS_TABLE])
@pytest.mark.parametrize(
    ("columns", "key"),
    [({"id": "int64"}, ["id"]), (dict.fromkeys(("group", "topic"), "string"), ["group", "topic"])],
)
def test_a_table_of_another_shape_in_place_of_groups(
    client: txnkv.Client, topic: txnkv.Topic, name: str, columns: dict[str, str], key: list[str]
) -> None:
    client.create_table(name, txnkv.Schema(columns, primary_key=key))
    words = rf"'{name}', .* with the columns {', '.join(columns)}: rename it"
    with pytest.raises(txnkv.SchemaError, match=words):
        client.consumer("t", group="g")
    client.rename_table(name, "mine")
    with client.consumer("t", group="g") as member:
        assert given(member) == ALL


def test_a_member_that_is_dropped_is_out_at_once(connect: Connect, topic: Any, until: Any) -> None:
    client = connect(keepalive_time=3600.0)
    one = client.consumer("t", group="g")
    assert given(one) == ALL
    del one
    with client.consumer("t", group="g") as two:
        assert until(lambda: given(two)) == ALL


def test_a_member_of_a_killed_process_is_out_after_its_keepalive_time(
    client: txnkv.Client, topic: txnkv.Topic, member: Any, process: Any, until: Any
) -> None:
    child = process(
        """
        with client.transaction() as txn:
            consumer = client.consumer("t", group="g")
            say([message.offset for message in consumer.poll(max_messages=2)])
        with client.transaction() as txn:
            consumer.commit(txn)
        consumer.poll(max_messages=2)
        say(consumer.committed())
        wait()
        """,
        options={"keepalive_time": 0.5},
    )
    assert child.hear() == [0, 1]
    assert child.hear()[0] == 2
    one = member()
    assert given(one) == {}
    child.kill()
    found = until(lambda: given(one))
    assert found == {**ALL, 0: [2]}


def test_a_member_that_does_not_poll_is_out(
    client: txnkv.Client, member: Any, now: Any, until: Any
) -> None:
    one, two = member(max_poll_seconds=4), member()
    for _ in range(3):
        one.poll(timeout=0)
        one.rewind()
        two.poll(timeout=0)
    assert one.partitions == [0, 1]
    leases = set()
    for _ in range(4):
        now.forward(3)
        one.poll(timeout=0)  # its lease is replaced in time
        two.poll(timeout=0)
        leases.add(one._membership._lease)
    assert (len(leases), one.partitions, two.partitions) == (4, [0, 1], [2, 3])
    now.forward(5)
    two.rewind()
    until(lambda: two.poll(timeout=0) and len(two.partitions) == 4)
    with pytest.raises(TransactionConflictError):
        one.poll(timeout=0)


def test_members_of_one_process_and_of_others_are_alike(connect: Connect, topic: Any) -> None:
    other = connect()
    with connect().consumer("t", group="g") as one, other.consumer("t", group="g") as two:
        found: list[Any] = []
        while not (one.partitions == [0, 1] and two.partitions == [2, 3]):
            for client, each in ((connect(), one), (other, two)):
                found += each.poll(timeout=0)
                commit(client, each)
        for each in (one, two):
            found += each.poll(timeout=0)
        assert sorted((m.partition, m.offset) for m in found) == [
            (n, at) for n in range(4) for at in range(3)
        ]


def test_what_makes_no_sense_is_refused(client: txnkv.Client, member: Any) -> None:
    with pytest.raises(TopicNotFoundError):
        client.consumer("nothing", group="g")
    wrong: dict[str, Any] = {"group": "", "reset": "begin", "isolation": "serializable"}
    for name, value in (wrong | {"max_poll_seconds": 0}).items():
        with pytest.raises(ValueError, match=name.split("_")[0]):
            client.consumer("t", **{"group": "g", name: value})
    one = member()
    with pytest.raises(ValueError, match="reads no partition"):
        one.position(0)
    one.poll(timeout=0)
    assert repr(one) == "<GroupConsumer of 't', group 'g': 0, 1, 2, 3>"
    pid = os.fork()
    if pid == 0:
        try:
            one.poll(timeout=0)
        except InvalidTxnStateError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    one.close()
    one.close()
    assert "closed" in repr(one)


def test_a_member_that_was_closed_says_so(topic: txnkv.Topic, member: Any) -> None:
    one = member()
    one.poll(timeout=0)
    with pytest.raises(ValueError, match="does not read partition 7: it reads \\[0, 1, 2, 3"):
        one.seek(7, 0)
    one.close()
    for call in (lambda: one.position(0), lambda: one.seek(0, 0), lambda: one.poll(timeout=0)):
        with pytest.raises(txnkv.ClosedError, match="this member of group 'g' was closed"):
            call()


@pytest.mark.parametrize(
    ("given", "kind"), [(0, ValueError), (-1, ValueError), ("5", TypeError), (None, TypeError)]
)
def test_counts_are_numbers_above_0(
    client: txnkv.Client, topic: txnkv.Topic, given: Any, kind: type[Exception]
) -> None:
    consumer, subscription = topic.consumer(), topic.subscribe("s")
    member = client.consumer(topic, group="g")
    for name, call in (
        ("max_messages", lambda: consumer.poll(max_messages=given)),
        ("max_messages", lambda: consumer.poll_batch(max_messages=given)),
        ("max_messages", lambda: subscription.receive_many(given)),
        ("max_messages", lambda: member.poll(max_messages=given)),
        ("max_bytes", lambda: topic.consumer(max_bytes=given)),
        ("max_bytes", lambda: topic.subscribe("z", max_bytes=given)),
        ("max_bytes", lambda: client.consumer(topic, group="g", max_bytes=given)),
        ("max_poll_seconds", lambda: client.consumer(topic, group="g", max_poll_seconds=given)),
    ):
        with pytest.raises(kind, match=name):
            call()
    member.close()


def test_a_transaction_that_began_before_the_partitions_came(
    client: txnkv.Client, topic: txnkv.Topic, member: Callable[..., GroupConsumer]
) -> None:
    """It was told that the partition went to another member."""
    own = member()
    early = client.new_transaction()
    refused = own.poll(timeout=10)
    with pytest.raises(TransactionConflictError, match="Poll, and then begin the transaction"):
        own.commit(early)
    early.rollback()
    found = own.poll(timeout=10)
    with client.transaction() as txn:
        own.commit(txn)
    assert found == refused
    assert own.committed() == dict.fromkeys(range(4), 3)


def test_the_rows_of_members_that_are_gone_go(
    client: txnkv.Client, member: Callable[..., GroupConsumer]
) -> None:
    """Else there is one more for each start of a program that dies."""
    for _ in range(3):
        member()._membership.end()
    last = member()
    last.poll(timeout=0)
    assert client.table(MEMBERS_TABLE).count() == 1
