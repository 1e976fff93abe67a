"""Producers over disks that fail and processes that are fenced and killed: each message once."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import txnkv
from tests import internals
from tests.topics.producers.producer_tools import TOPIC, Make, back_to, deliver, sender
from tools.topic_contents import stored, values
from txnkv.client.producer import Producer
from txnkv.errors import (
    CommitOutcomeUnknownError,
    ProducerFencedError,
    StorageFullError,
    UnavailableError,
)
from txnkv.storage import arm, disarm
from txnkv.topics.messages.message import MessageId
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions
from txnkv.topics.write import producers

# -- disks that fail -------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", ["log.durable", "log.written", "status.before_commit", "status.after_commit",
              "status.unsynced", "producer.recorded"]
)  # fmt: skip
def test_a_commit_that_breaks_off_is_sent_again_and_is_there_once(
    point: str, make: Make, client: txnkv.Client
) -> None:
    producer = make(linger=30.0)
    producer.send("a")
    producer.flush()
    second, third = producer.send("b"), producer.send("c")
    arm(point, "error@1")
    producer.flush()
    disarm()
    assert (second.result(0), third.result(0)) == (MessageId(0, 1), MessageId(0, 2))
    fourth = producer.send("d")
    producer.flush()
    assert fourth.result(0) == MessageId(0, 3)
    assert values(client, TOPIC) == [b"a", b"b", b"c", b"d"]
    assert producer.sent == 4


def test_patience_runs_out_and_the_producer_goes_on(make: Make, client: txnkv.Client) -> None:
    """Unsure of one batch, it begins a new epoch; what was told is true."""
    producer = make(linger=30.0, patience=0.0)
    producer.send("a")
    producer.flush()
    lost = producer.send("b")
    arm("log.durable", "error")
    with pytest.raises(CommitOutcomeUnknownError):
        producer.flush()
    disarm()
    assert isinstance(lost.exception(0), CommitOutcomeUnknownError)
    producer.send("c")
    producer.flush()
    assert Counter(values(client, TOPIC)) == Counter([b"a", b"b", b"c"])
    assert [each.header.epoch for each in stored(client, TOPIC)] == [0, 0, 1]


def test_a_full_disk_leaves_no_gap(
    make: Make, client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make(linger=30.0)
    lost = producer.send("a")
    with monkeypatch.context() as patch:
        patch.setattr(producers, "record", _raise_full)
        with pytest.raises(StorageFullError):
            producer.flush()
    assert isinstance(lost.exception(0), StorageFullError)
    producer.send("b")
    producer.flush()
    assert values(client, TOPIC) == [b"b"]
    assert stored(client, TOPIC)[0].header.epoch == 0


def _raise_full(*_: object) -> None:
    raise StorageFullError("no room")


def test_flush_tells_each_error_once(make: Make) -> None:
    producer = make(linger=30.0, patience=0.0)
    arm("producer.checked", "error")
    futures = [producer.send("a"), producer.send("b")]
    with pytest.raises(UnavailableError):
        producer.flush()
    disarm()
    producer.flush()
    assert {type(future.exception(0)) for future in futures} == {UnavailableError}


# -- fencing ---------------------------------------------------------------------------


def test_a_later_producer_of_the_name_fences_this_one(make: Make, client: txnkv.Client) -> None:
    elder = make(linger=30.0)
    elder.send("a")
    elder.flush()
    lost = elder.send("zombie")
    later = make()
    with pytest.raises(ProducerFencedError, match="epoch 1"):
        elder.flush()
    assert isinstance(lost.exception(0), ProducerFencedError)
    with pytest.raises(ProducerFencedError):
        elder.send("again")
    assert later.send("b").result(20) == MessageId(0, 1)
    assert values(client, TOPIC) == [b"a", b"b"]
    assert later.sent == 2


def test_names_and_topics_do_not_meet(make: Make, client: txnkv.Client) -> None:
    other = internals.topics(client).create("other", 1, "marker", TopicOptions())
    first, second, nameless = make("a"), make("b"), make(None)
    third, also_nameless = Producer(client, other, "a"), make(None)
    for producer in (first, second, nameless, third, also_nameless):
        producer.send("x").result(20)
    third.close()
    assert len(values(client, TOPIC)) == 4


def test_epochs_run_out_and_the_name_gets_another_id(make: Make, client: txnkv.Client) -> None:
    elder = make()
    elder.send("a").result(20)
    with internals.status(client).write() as cur:
        cur.execute("UPDATE producers SET epoch = ?", (producers.EPOCHS - 1,))
    later = make()
    later.send("b").result(20)
    with pytest.raises(ProducerFencedError, match="took over the name"):
        elder.send("zombie").result(20)
    assert later.sent == 2
    ids = [each.header.producer_id for each in stored(client, TOPIC)]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("number", [1, 2])
def test_a_process_is_fenced_by_another(
    number: int,
    client: txnkv.Client,
    topic: TopicInfo,
    process: Callable[..., Any],
) -> None:
    """A zombie that is stopped at any moment shows nothing after its successor was made."""
    zombie = process(
        """
        from txnkv.client.producer import Producer
        producer = Producer(client, client.instance.topics.get("events"), "billing")
        say(producer.send("first").result(60))
        for i in range(number - 1):
            producer.send("more").result(60)
        say(); wait()
        future = producer.send("zombie")
        say(type(future.exception(60)).__name__)
        """,
        number=number,
    )
    assert zombie.hear() == MessageId(0, 0)
    zombie.hear()
    with Producer(client, topic, "billing") as later:
        assert later.sent == number
        zombie.tell()
        assert zombie.hear() == "ProducerFencedError"
        later.send("mine")
    assert (values(client, TOPIC))[number:] == [b"mine"]


def test_a_stopped_process_goes_on_and_is_fenced(
    client: txnkv.Client, topic: TopicInfo, process: Callable[..., Any]
) -> None:
    """SIGSTOP just before the commit is queued, a successor, SIGCONT: not a message of it."""
    zombie = process(
        """
        import signal, threading
        from txnkv.client.producer import Producer
        producer = Producer(client, client.instance.topics.get("events"), "billing", linger=60)
        commit = producer._sender._topics.log.commit
        def stopping(asked):
            say("stops")
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread at once
            return commit(asked)
        producer._sender._topics.log.commit = stopping
        future = producer.send("zombie")
        try:
            producer.flush()
        except txnkv.ProducerFencedError as error:
            say("fenced")
        """
    )
    assert zombie.hear() == "stops"
    os.waitpid(zombie.popen.pid, os.WUNTRACED)
    with Producer(client, topic, "billing") as later:
        later.send("mine").result(20)
        zombie.popen.send_signal(signal.SIGCONT)
        assert zombie.hear() == "fenced"
    assert values(client, TOPIC) == [b"mine"]


# -- kill -9 ---------------------------------------------------------------------------


_KILLED = """
from txnkv.client.producer import Producer
producer = Producer(client, client.instance.topics.get("events"), "billing", linger=60)
for i in range(producer.sent, 10):
    say(i)
    future = producer.send(f"m{i}", key=f"k{i}")
    if i % 3 == 2:
        producer.flush()
producer.close()
"""


@pytest.mark.parametrize(
    "point",
    ["log.written", "log.durable", "status.before_commit", "status.after_commit",
     "status.unsynced", "producer.checked", "producer.recorded"],
)  # fmt: skip
@pytest.mark.parametrize("hit", [2, 3])
def test_killed_between_send_and_answer_then_sent_again(
    point: str, hit: int, client: txnkv.Client, topic: TopicInfo, process: Callable[..., Any]
) -> None:
    """Whoever takes over the name goes on behind what is durable: none lost, none twice."""
    process(_KILLED, fault=f"{point}=kill@{hit}").finish(-signal.SIGKILL)
    process(_KILLED).finish()
    assert values(client, TOPIC) == [b"m%d" % i for i in range(10)]


@pytest.mark.parametrize("point", ["log.written", "log.durable", "producer.recorded"])
def test_killed_and_the_same_batch_comes_again(
    point: str, client: txnkv.Client, topic: TopicInfo, process: Callable[..., Any]
) -> None:
    """A retry under the same producer, epoch and sequence is answered by the duplicate rule."""
    child = process(
        """
        import pyarrow as pa
        from txnkv.storage import arm
        from txnkv.topics.write.producer_sender import Sender
        engine = client.instance.topics
        sender = Sender(engine, engine.get("events"), "billing")
        sender.deliver([(0, pa.record_batch({"value": [b"a"]}))])
        say((sender.producer, dict(sender._next)))
        arm(point, "kill")
        sender.deliver([(0, pa.record_batch({"value": [b"b", b"c"]}))])
        """,
        point=point,
    )
    producer, numbers = child.hear()
    child.finish(-signal.SIGKILL)
    by = sender(client, None)
    by.producer = producer
    back_to(by, numbers)
    assert deliver(by, "b", "c").base == 1
    assert deliver(by, "d").base == 3
    assert values(client, TOPIC) == [b"a", b"b", b"c", b"d"]


def test_killed_at_random_again_and_again(
    client: txnkv.Client, topic: TopicInfo, process: Callable[..., Any]
) -> None:
    for hit in (1, 5, 2, 9, 4, 1):
        child = process(_KILLED.replace("10", "40"), fault=f"status.before_commit=kill@{hit + 1}")
        child.popen.communicate(timeout=60)
    process(_KILLED.replace("10", "40")).finish()
    assert values(client, TOPIC) == [b"m%d" % i for i in range(40)]


_STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 12)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.sampled_from(["log.written", "log.durable", "status.unsynced",
                               "producer.recorded", "producer.checked"]), st.integers(1, 2)),
    st.tuples(st.just("take over"), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0)),
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_STEPS, max_size=25), st.sampled_from([80, 400, 1 << 20]))
def test_whatever_fails_each_message_is_there_once_and_in_order(
    steps: list[tuple[str, int]], batch_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        client = txnkv.connect(folder + "/store")
        internals.topics(client).create(TOPIC, 1, "marker", TopicOptions())

        def begin() -> Producer:
            info = internals.topics(client).get(TOPIC)
            return Producer(client, info, "p", linger=60.0, batch_bytes=batch_bytes)

        producer, sent = begin(), 0
        for step, number in steps:
            if step == "send":
                for _ in range(number):
                    producer.send(b"%d" % sent)
                    sent += 1
            elif step == "flush":
                producer.flush()
            elif step == "take over":
                producer.flush()
                disarm()
                elder, producer = producer, begin()
                assert producer.sent == sent
                elder.send("zombie")
                with pytest.raises(ProducerFencedError):
                    elder.close()
            elif step == "reopen":
                producer.close()
                disarm()
                client.close()
                client = txnkv.connect(folder + "/store")
                producer = begin()
            else:
                arm(step, f"error@{number}")
        producer.close()
        disarm()
        assert producer.sent == sent
        assert values(client, TOPIC) == [b"%d" % i for i in range(sent)]
        assert client.check().problems == []
        client.close()
