"""The rounds of a consumer group, without sockets: who joins, who leads, who is out."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from txnkv.kafka import consumer_groups
from txnkv.kafka.api_tables import Code, KafkaError
from txnkv.kafka.consumer_groups import EMPTY, STABLE, ConsumerGroup, Groups, JoinRequest


def running() -> None:
    """The server does not stop."""


def asking(name: str, id: str = "", **more: Any) -> JoinRequest:
    known = {"range": name.encode(), "sticky": b""}
    asked = JoinRequest(id, None, name, "here", 30_000, 60_000, "consumer", known, False)
    return asked._replace(**more)


def refused(code: Code, do: Any, *args: Any) -> str:
    with pytest.raises(KafkaError) as caught:
        do(*args)
    assert caught.value.code is code
    return str(caught.value)


@pytest.fixture
def others() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first member does not wait for others."""
    monkeypatch.setattr(consumer_groups, "_GATHER", 0)


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_one_member_leads_itself() -> None:
    group = ConsumerGroup("g")
    id, joined = group.join(asking("a"), running)
    assert (joined.generation, joined.protocol, joined.leader) == (1, "range", id)
    assert [each.protocols["range"] for each in joined.members] == [b"a"]
    assert group.sync(id, None, 1, {id: b"all"}, running) == b"all"
    group.heartbeat(id, None, 1)
    refused(Code.ILLEGAL_GENERATION, group.heartbeat, id, None, 0)
    refused(Code.UNKNOWN_MEMBER_ID, group.heartbeat, "b", None, 1)
    assert group.leave(id, None) == id
    assert group.look() == (EMPTY, [])


def test_members_that_begin_together_make_one_round(
    others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_groups, "_GATHER", 1)
    group = ConsumerGroup("g")
    begin = time.monotonic()
    waiting = []
    for name in ("a", "b", "c"):
        waiting.append(others.submit(group.join, asking(name), running))
        until(lambda: len(group.members) == len(waiting))
    rounds = [each.result(60)[1] for each in waiting]
    assert {each.generation for each in rounds} == {1}
    assert sorted(len(each.members) for each in rounds) == [0, 0, 3]
    assert time.monotonic() - begin >= 1


def test_a_second_member_makes_the_first_join_again(others: ThreadPoolExecutor) -> None:
    group = ConsumerGroup("g")
    one, _ = group.join(asking("a"), running)
    group.sync(one, None, 1, {one: b"all"}, running)
    waiting: Future[Any] = others.submit(group.join, asking("b"), running)
    until(lambda: len(group.members) == 2)
    refused(Code.REBALANCE_IN_PROGRESS, group.heartbeat, one, None, 1)
    assert not waiting.done()
    _, joined = group.join(asking("a", one), running)
    two, other = waiting.result(60)
    assert joined.generation == other.generation == 2
    assert {each.id for each in joined.members} == {one, two}
    assert other.members == []
    share: Future[bytes] = others.submit(group.sync, two, None, 2, {}, running)
    assert group.sync(one, None, 2, {one: b"1", two: b"2"}, running) == b"1"
    assert share.result(60) == b"2"
    assert group.look()[0] == STABLE
    assert group.join(asking("b", two), running)[1].generation == 2  # it only asked again


def test_who_does_not_join_in_time_is_out(others: ThreadPoolExecutor) -> None:
    group = ConsumerGroup("g")
    one, _ = group.join(asking("a", rebalance_millis=100), running)
    group.sync(one, None, 1, {}, running)
    two, joined = group.join(asking("b", rebalance_millis=100), running)
    assert joined.leader == two
    refused(Code.UNKNOWN_MEMBER_ID, group.heartbeat, one, None, 2)


def test_who_gives_no_sign_is_out(others: ThreadPoolExecutor) -> None:
    group = ConsumerGroup("g")
    group.join(asking("a", session_millis=1000), running)
    until(lambda: group.look() == (EMPTY, []))


def test_a_member_is_told_its_id_first() -> None:
    group = ConsumerGroup("g")
    id = refused(Code.MEMBER_ID_REQUIRED, group.join, asking("a", names_itself=True), running)
    assert group.join(asking("a", id, names_itself=True), running)[0] == id
    refused(Code.UNKNOWN_MEMBER_ID, group.join, asking("a", "another"), running)


def test_an_instance_that_starts_again_takes_its_place(others: ThreadPoolExecutor) -> None:
    """With its share, in the generation of now: nobody else notices."""
    group = ConsumerGroup("g")
    one, _ = group.join(asking("a", instance="i"), running)
    group.sync(one, "i", 1, {one: b"all"}, running)
    two, joined = group.join(asking("a", instance="i"), running)
    assert two != one
    assert joined[:1] + joined[3:] == (1, two, [group.members[two]], True)
    assert group.sync(two, "i", 1, {}, running) == b"all"
    refused(Code.FENCED_INSTANCE_ID, group.heartbeat, one, "i", 1)
    refused(Code.FENCED_INSTANCE_ID, group.join, asking("a", one, instance="i"), running)
    three, joined = group.join(asking("other", instance="i"), running)  # knows other topics
    assert joined[:1] + joined[3:] == (2, three, [group.members[three]], False)
    waiting = others.submit(group.join, asking("b", instance="j"), running)
    until(lambda: len(group.members) == 2)
    again = others.submit(group.join, asking("b", instance="j"), running)
    with pytest.raises(KafkaError) as caught:
        waiting.result(60)
    assert caught.value.code is Code.FENCED_INSTANCE_ID
    assert group.join(asking("other", three, instance="i"), running)[1].generation == 3
    assert len(group.members) == 2
    assert again.result(60)[1].generation == 3
    assert group.leave("", "i") == three


def pair(group: ConsumerGroup, others: ThreadPoolExecutor, **more: Any) -> list[str]:
    """Two static members in one round; the ids of the leader and the other."""
    first = group.join(asking("a", instance="i", **more), running)[0]
    waiting = others.submit(group.join, asking("b", instance="j", **more), running)
    until(lambda: len(group.members) == 2)
    group.join(asking("a", first, instance="i", **more), running)
    return [first, waiting.result(60)[0]]


def test_an_instance_that_starts_again_before_the_round_is_assigned(
    others: ThreadPoolExecutor,
) -> None:
    """The leader knows its id of before, so there is another round."""
    group = ConsumerGroup("g")
    leader, _ = pair(group, others)
    waiting = others.submit(group.join, asking("b", instance="j"), running)
    until(lambda: group.state == consumer_groups._PREPARING)
    refused(Code.REBALANCE_IN_PROGRESS, group.sync, leader, "i", 2, {}, running)
    _, joined = group.join(asking("a", leader, instance="i"), running)
    other = waiting.result(60)[0]
    assert {each.id for each in joined.members} == {leader, other}
    group.sync(leader, "i", 3, {leader: b"1", other: b"2"}, running)
    assert group.sync(other, "j", 3, {}, running) == b"2"


def test_an_instance_that_is_away_for_a_round_stays(others: ThreadPoolExecutor) -> None:
    """Until its session ends; its share waits for it."""
    group = ConsumerGroup("g")
    leader, away = pair(group, others, rebalance_millis=300)
    group.sync(leader, "i", 2, {leader: b"1", away: b"2"}, running)
    new = others.submit(group.join, asking("c", rebalance_millis=300), running)
    until(lambda: len(group.members) == 3)
    _, joined = group.join(asking("a", leader, instance="i", rebalance_millis=300), running)
    assert {each.id for each in joined.members} == {leader, away, new.result(60)[0]}
    group.sync(leader, "i", 3, {leader: b"1", away: b"2", new.result()[0]: b"3"}, running)
    back = group.join(asking("b", instance="j", rebalance_millis=300), running)
    assert back[1].generation == 3
    assert group.sync(back[0], "j", 3, {}, running) == b"2"
    group.members[back[0]].seen -= 31
    refused(Code.REBALANCE_IN_PROGRESS, group.heartbeat, leader, "i", 3)
    assert back[0] not in group.members


def test_members_have_a_protocol_in_common() -> None:
    group = ConsumerGroup("g")
    group.join(asking("a"), running)
    refused(
        Code.INCONSISTENT_GROUP_PROTOCOL, group.join, asking("b", protocols={"odd": b""}), running
    )
    refused(
        Code.INCONSISTENT_GROUP_PROTOCOL, group.join, asking("b", protocol_type="connect"), running
    )
    refused(Code.INVALID_SESSION_TIMEOUT, group.join, asking("b", session_millis=1), running)


def test_offsets_are_taken_of_members_alone() -> None:
    group = ConsumerGroup("g")

    def commit(
        member: str, generation: int, in_transaction: bool = False, instance: str | None = None
    ) -> None:
        with group.committing(member, instance, generation, in_transaction=in_transaction):
            pass

    commit("", -1)
    commit("left", -1, in_transaction=True)
    id, _ = group.join(asking("a"), running)
    with pytest.raises(KafkaError):
        commit(id, 1)
    group.sync(id, None, 1, {}, running)
    commit(id, 1)
    for member, generation in ((id, 0), ("b", 1), ("", -1)):
        with pytest.raises(KafkaError):
            commit(member, generation)
    commit("", -1, in_transaction=True)
    for member, instance in ((id, None), ("", "i"), ("b", None), ("b", "i")):
        with pytest.raises(KafkaError):  # who names itself is a member of now, or it is too late
            commit(member, -1, in_transaction=True, instance=instance)


def test_waits_end_with_the_server(others: ThreadPoolExecutor) -> None:
    group = ConsumerGroup("g")
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise ConnectionAbortedError

    group.join(asking("a"), check)
    waiting = others.submit(group.join, asking("b"), check)
    until(lambda: len(group.members) == 2)
    stopped.set()
    with pytest.raises(ConnectionAbortedError):
        waiting.result(60)


def test_who_is_gone_while_it_waits_is_out_with_its_session(others: ThreadPoolExecutor) -> None:
    """It was a member until the round was over, of which the leader was told."""
    group, gone = ConsumerGroup("g"), threading.Event()

    def check() -> None:
        if gone.is_set():
            raise ConnectionAbortedError

    one, _ = group.join(asking("a"), running)
    broken = others.submit(group.join, asking("b"), check)
    until(lambda: len(group.members) == 2)
    (two,) = group.members.keys() - {one}
    again = others.submit(group.join, asking("b", two), running)  # over another connection
    until(lambda: group.members[two].waits == 2)
    gone.set()
    with pytest.raises(ConnectionAbortedError):
        broken.result(60)
    group.members[two].seen -= 31
    group.look()
    assert two in group.members
    gone.clear()
    group.join(asking("a", one), running)
    again.result(60)
    new = others.submit(group.join, asking("c"), check)
    until(lambda: len(group.members) == 3)
    (three,) = group.members.keys() - {one, two}
    gone.set()
    with pytest.raises(ConnectionAbortedError):
        new.result(60)
    assert three in group.members
    group.members[three].seen -= 31
    refused(Code.REBALANCE_IN_PROGRESS, group.heartbeat, one, None, 2)
    assert group.members.keys() == {one, two}


def test_a_group_is_kept_from_its_first_join_on() -> None:
    groups = Groups()
    refused(Code.UNKNOWN_MEMBER_ID, groups.get("g").heartbeat, "nobody", None, 1)
    assert list(groups.names()) == []
    assert groups.get("g", keep=True) is groups.get("g")
    assert list(groups.names()) == ["g"]
