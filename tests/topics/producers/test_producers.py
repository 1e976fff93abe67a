"""Idempotent producers over a store: once, whatever happens on the way.

What a dead process or a failed disk leaves open is closed by sending again: the store knows
the sequence numbers, and answers what is there already with where it is.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from tests.topics.producers.producer_tools import (
    TOPIC,
    Make,
    back_to,
    batch,
    deliver,
    rows,
    sender,
    sequences,
    sweep,
)
from tools.forked import Popen
from tools.interrupts import Interruption
from tools.topic_contents import stored, values
from txnkv.client.producer import Producer
from txnkv.errors import (
    ClosedError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    TopicNotFoundError,
)
from txnkv.topics.messages.message import MessageId
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions
from txnkv.topics.write import producers
from txnkv.topics.write.producer_sender import Sender

# -- what comes in, and where ------------------------------------------------------------


def test_each_future_has_the_place_of_its_message(make: Make, client: txnkv.Client) -> None:
    producer = make()
    futures = [producer.send(f"m{i}") for i in range(100)]
    producer.flush()
    assert [future.result(0) for future in futures] == [MessageId(0, i) for i in range(100)]
    assert values(client, TOPIC) == [b"m%d" % i for i in range(100)]
    assert producer.sent == 100


def test_what_waits_is_sent_without_a_flush(make: Make, client: txnkv.Client) -> None:
    producer = make()
    for at, text in enumerate("ab"):
        sent = producer.send(text)
        assert wait([sent], 20).done
        assert sent.result(0) == MessageId(0, at)
    assert values(client, TOPIC) == [b"a", b"b"]


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_message_that_is_waited_for_does_not_wait_for_others(
    make: Make, client: txnkv.Client, timeout: float | None
) -> None:
    producer = make(linger=3600)
    first, second = producer.send("a"), producer.send("b")
    assert second.result(timeout) == MessageId(0, 1)
    assert first.done()
    assert producer.send("c").exception(timeout) is None
    assert values(client, TOPIC) == [b"a", b"b", b"c"]


def test_threads_that_wait_each_for_its_message_go_together(
    make: Make, client: txnkv.Client
) -> None:
    producer = make(linger=3600)

    def work(thread: int) -> None:
        for at in range(50):
            producer.send(f"{thread} {at}").result()

    at_once(*(partial(work, thread) for thread in range(8)))
    found = [value.decode().split() for value in values(client, TOPIC) if value]
    for thread in range(8):
        assert [int(at) for of, at in found if int(of) == thread] == list(range(50))


def test_who_waits_for_a_message_does_not_wait_for_callbacks(
    make: Make, client: txnkv.Client
) -> None:
    producer = make(linger=3600)
    goes_on, called = threading.Event(), threading.Event()
    first, second = producer.send("a"), producer.send("b")
    second.add_done_callback(lambda _: called.set() if goes_on.wait(60) else None)
    assert first.result() == MessageId(0, 0)
    goes_on.set()
    assert called.wait(60)


@pytest.mark.parametrize("way", ["flush", "result", "called back"])
def test_what_others_keep_from_its_turn_is_sent_once(
    make: Make, client: txnkv.Client, way: str
) -> None:
    producer = make(linger=3600)
    held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with internals.store(client).status.write():
            held.set()
            ends.wait(60)

    sent = [producer.send(text) for text in "abc"]
    if way == "called back":
        sent[0].add_done_callback(lambda _: client.run(lambda txn: txn.send(TOPIC, "d")))
    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    threading.Timer(0.2, ends.set).start()
    if way == "result":
        assert sent[1].result() == MessageId(0, 1)
    else:
        producer.flush()
    holder.join()
    assert [each.result(0) for each in sent] == [MessageId(0, at) for at in range(3)]
    assert values(client, TOPIC) == [b"a", b"b", b"c", b"d"][: 4 if way == "called back" else 3]


def test_signals_at_any_instant_lose_and_double_nothing(make: Make, client: txnkv.Client) -> None:
    producer = make(linger=3600)

    def call() -> None:
        sent.append(producer.send(str(n)))
        sent[0].result() if n % 2 else producer.flush()

    for n in itertools.count(1):
        sent: list[Any] = []
        interruption = Interruption(n)
        interruption.run(call)
        producer.flush()
        assert [each.result(0) for each in sent] == [each.result(60) for each in sent]
        if interruption.where is None:
            break
    found = [int(value) for value in values(client, TOPIC) if value]
    assert found == sorted(set(found))
    assert found[-1] == n
    assert n > 40


def test_an_error_comes_to_who_waits(make: Make, client: txnkv.Client) -> None:
    producer = make(linger=3600)
    sent = producer.send("a")
    client.drop_topic(TOPIC)
    with pytest.raises(TopicNotFoundError):
        sent.result()
    with pytest.raises(TopicNotFoundError):
        producer.close()


def test_messages_that_come_together_are_one_batch(make: Make, client: txnkv.Client) -> None:
    producer = make(linger=30.0)
    for i in range(50):
        producer.send(f"{i}")
    producer.flush()
    assert [len(each.values) for each in stored(client, TOPIC)] == [50]


def test_batches_say_who_sent_them(make: Make, client: txnkv.Client) -> None:
    for _ in range(2):
        producer = make(linger=30.0)
        producer.send("a")
        producer.send("b")
        producer.flush()
        producer.send("c")
        producer.flush()
    headers = [each.header for each in stored(client, TOPIC)]
    found = [(header.epoch, header.base_sequence, header.count) for header in headers]
    assert found == [(0, 0, 2), (0, 2, 1), (1, 0, 2), (1, 2, 1)]
    assert len({header.producer_id for header in headers}) == 1
    assert {header.txn_id for header in headers} == {0}


def test_keys_keep_their_partition_and_their_order(client: txnkv.Client) -> None:
    info = internals.topics(client).create("keyed", 4, "marker", TopicOptions())
    with Producer(client, info, "p", batch_bytes=500) as producer:
        futures = [(i % 7, producer.send(f"{i}", key=f"k{i % 7}")) for i in range(300)]
    by_key: dict[int, list[MessageId]] = {}
    for key, future in futures:
        by_key.setdefault(key, []).append(future.result(0))
    assert {len({id.partition for id in ids}) for ids in by_key.values()} == {1}
    assert all(ids == sorted(ids) for ids in by_key.values())
    assert len({ids[0].partition for ids in by_key.values()}) > 1
    for number in range(4):
        there = values(client, "keyed", number)
        for id, value in ((f.result(0), b"%d" % i) for i, (_, f) in enumerate(futures)):
            if id.partition == number:
                assert there[id.offset] == value


def test_partition_headers_and_timestamp_are_taken(client: txnkv.Client) -> None:
    info = internals.topics(client).create("full", 3, "marker", TopicOptions())
    at = datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    with Producer(client, info, "p") as producer:
        id = producer.send(b"v", b"k", partition=2, headers=[("h", b"1")], timestamp=at)
        other = producer.send(None, partition=2)
    assert (id.result(0), other.result(0)) == (MessageId(2, 0), MessageId(2, 1))
    header = stored(client, "full", 2)[0].header
    assert header.base_timestamp == int(at.timestamp() * 1e6)
    assert values(client, "full", 2) == [b"v", None]
    with pytest.raises(ValueError, match="no partition 3"):
        Producer(client, info, "p").send("x", partition=3)


def test_a_large_message_is_pieces_that_stand_together(client: txnkv.Client) -> None:
    info = internals.topics(client).create(
        "large", 1, "marker", TopicOptions(max_message_bytes=1000)
    )
    with Producer(client, info, "p", linger=30.0) as producer:
        ids = [producer.send(value) for value in (b"a", b"x" * 3500, b"b")]
    assert [id.result(0).offset for id in ids] == [0, 4, 5]  # of its last piece
    batches = stored(client, "large")
    assert [each.header.base_sequence for each in batches] == [0, 1, 2, 3, 4, 5]
    assert [each.header.is_chunk for each in batches] == [False] + 4 * [True] + [False]
    assert b"".join(value or b"" for each in batches[1:5] for value in each.values) == b"x" * 3500
    assert producer.sent == 3
    with client.topic("large").consumer() as consumer:
        found = consumer.poll(timeout=5.0)
    assert [message.id for message in found] == [id.result(0) for id in ids]
    assert [message.value for message in found] == [b"a", b"x" * 3500, b"b"]


def test_threads_share_a_producer(make: Make, client: txnkv.Client) -> None:
    producer = make(batch_bytes=1000)

    def work(thread: int) -> None:
        for i in range(200):
            producer.send(f"{thread}:{i}")

    at_once(*(partial(work, t) for t in range(4)))
    producer.flush()
    found = [(value or b"").decode().split(":") for value in values(client, TOPIC)]
    for thread_number in range(4):
        own = [int(i) for t, i in found if int(t) == thread_number]
        assert own == list(range(200))


def test_a_callback_may_send_and_flush(client: txnkv.Client) -> None:
    """`flush` in the callback of a future waited for the turn that its own thread had."""
    topic = client.create_topic("two", partitions=2)
    producer = topic.producer(linger=30.0)
    answers: list[Any] = []

    def answered(future: Any) -> None:
        answers.append(future.result())
        if len(answers) <= 4:
            producer.send(f"again {len(answers)}", partition=0)
            producer.flush()

    for at in range(2):
        producer.send(f"m{at}", partition=at).add_done_callback(answered)
    done = threading.Thread(target=producer.flush, daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive()
    assert answers == [MessageId(0, 0), MessageId(1, 0)]
    found = [m.value for m in topic.consumer(partitions=[0]).poll(timeout=0)]
    assert found == [b"m0", b"again 1", b"again 2"]
    producer.close()


def test_a_cancelled_message_is_not_sent(make: Make, client: txnkv.Client) -> None:
    producer = make(linger=30.0)
    first, second = producer.send("a"), producer.send("b")
    assert first.cancel()
    producer.flush()
    assert second.result(0) == MessageId(0, 0)
    assert values(client, TOPIC) == [b"b"]


# -- duplicates and gaps -----------------------------------------------------------------


def test_a_duplicate_is_answered_with_its_first_offsets(
    client: txnkv.Client, topic: TopicInfo
) -> None:
    by = sender(client)
    numbers = []
    for i in range(5):
        numbers.append(sequences(by))
        deliver(by, f"{i}a", f"{i}b")
    after = sequences(by)
    for i in (4, 0, 2):
        back_to(by, numbers[i])
        assert deliver(by, f"{i}a", f"{i}b").base == 2 * i
    back_to(by, after)
    assert deliver(by, "new").base == 10
    assert len(values(client, TOPIC)) == 11


def test_a_duplicate_of_the_sixth_batch_back_is_refused(
    client: txnkv.Client, topic: TopicInfo
) -> None:
    by = sender(client)
    for i in range(6):
        deliver(by, f"{i}")
    back_to(by, {})
    with pytest.raises(OutOfOrderSequenceError):
        deliver(by, "0")
    assert len(values(client, TOPIC)) == 6


def test_a_gap_is_refused_and_the_producer_goes_on(client: txnkv.Client, topic: TopicInfo) -> None:
    by = sender(client)
    deliver(by, "a")
    back_to(by, {topic.partitions[0]: 2})
    with pytest.raises(OutOfOrderSequenceError, match="1 was to come"):
        deliver(by, "c")
    assert values(client, TOPIC) == [b"a"]
    deliver(by, "b")
    assert values(client, TOPIC) == [b"a", b"b"]
    assert [each.header.epoch for each in stored(client, TOPIC)] == [0, 1]


def test_a_first_batch_has_to_be_the_first(client: txnkv.Client, topic: TopicInfo) -> None:
    by = sender(client)
    back_to(by, {topic.partitions[0]: 3})
    with pytest.raises(OutOfOrderSequenceError):
        deliver(by, "d")


def test_partitions_have_sequences_of_their_own(client: txnkv.Client) -> None:
    info = internals.topics(client).create("two", 2, "marker", TopicOptions())
    by = Sender(internals.topics(client), info, "p")
    assert [d.base for d in by.deliver([(0, batch("a", "b")), (1, batch("c"))])] == [0, 0]
    numbers = sequences(by)
    assert [d.base for d in by.deliver([(0, batch("d")), (1, batch("e", "f"))])] == [2, 1]
    back_to(by, numbers)
    assert [d.base for d in by.deliver([(0, batch("d")), (1, batch("e", "f"))])] == [2, 1]
    assert sorted(numbers.values()) == [1, 2]
    assert (len(values(client, "two", 0)), len(values(client, "two", 1))) == (3, 3)


# -- closing, forks, exits ---------------------------------------------------------------


def test_a_commit_has_several_batches_of_a_partition(
    client: txnkv.Client, topic: TopicInfo
) -> None:
    """They take their offsets in their order, by the numbers of this sender or of its caller."""
    by = sender(client)
    several = [(0, batch("a", "b")), (0, batch("c"))]
    assert [each.base for each in by.deliver(several)] == [0, 2]
    assert [each.base for each in by.deliver(several, [0, 2])] == [0, 2]  # once more
    assert [each.base for each in by.deliver([*several, (0, batch("d"))], [0, 2, 3])] == [0, 2, 3]
    with pytest.raises(OutOfOrderSequenceError, match="twice"):
        by.deliver([(0, batch("e")), (0, batch("e"))], [4, 4])
    with pytest.raises(OutOfOrderSequenceError):
        by.deliver([(0, batch("e")), (0, batch("g"))], [4, 6])
    assert [each.base for each in by.deliver([(0, batch("e")), (0, batch("f"))], [4, 5])] == [4, 5]
    assert deliver(by, "g").base == 6
    assert values(client, TOPIC) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


def test_close_sends_what_waits_and_takes_no_more(make: Make, client: txnkv.Client) -> None:
    producer = make(linger=60.0)
    future = producer.send("a")
    producer.close()
    producer.close()
    assert future.result(0) == MessageId(0, 0)
    with pytest.raises(ClosedError, match="was closed"):
        producer.send("b")
    assert values(client, TOPIC) == [b"a"]


def test_what_waits_at_exit_is_sent(
    client: txnkv.Client, topic: TopicInfo, process: Callable[..., Any]
) -> None:
    process(
        """
        from txnkv.client.producer import Producer
        producer = Producer(client, client.instance.topics.get("events"), "p", linger=60)
        producer.send("a"); producer.send("b")
        """
    ).finish()
    assert values(client, TOPIC) == [b"a", b"b"]


def test_a_client_sends_what_waits_in_its_producers(
    make: Make, client: txnkv.Client, store_path: Path
) -> None:
    mine = make("mine", linger=60.0).send("a")
    with txnkv.connect(store_path) as other:
        producer = other.topic(TOPIC).producer("other", linger=60.0)
        theirs = producer.send("b")
    assert theirs.result(0) == MessageId(0, 0)
    with pytest.raises(ClosedError):
        producer.send("c")
    assert not mine.done()


def test_a_producer_that_nobody_holds_sends_what_it_has(make: Make, client: txnkv.Client) -> None:
    future = Producer(client, internals.topics(client).get(TOPIC), "dropped").send("a")
    assert future.result(20) == MessageId(0, 0)


def test_a_forked_child_leaves_it_to_the_parent(tmp_path: Path) -> None:
    code = """
import os, sys, txnkv
from txnkv.client.producer import Producer
from txnkv.topics.topic_catalog import TopicOptions
client = txnkv.connect(sys.argv[1])
info = client.instance.topics.create("events", 1, "marker", TopicOptions())
producer = Producer(client, info, "p", linger=60)
first = producer.send("a")
pid = os.fork()
if pid == 0:
    try:
        producer.send("child")
    except txnkv.ClosedError as error:
        assert "forked" in str(error)
    producer.close()
    with Producer(client, info, "q") as own:
        assert own.send("b").result(60).offset == 0
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
producer.flush()
assert first.result(0).offset == 1
assert producer.send("c").partition if False else True
producer.close()
client.close()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    child = Popen(command, stderr=subprocess.PIPE, text=True)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    with txnkv.connect(tmp_path / "store") as client:
        assert values(client, TOPIC) == [b"b", b"a"]


def test_a_dropped_topic_takes_nothing(make: Make, client: txnkv.Client) -> None:
    producer = make(linger=30.0)
    producer.send("a")
    producer.flush()
    lost = producer.send("b")
    internals.topics(client).drop(TOPIC)
    with pytest.raises(TopicNotFoundError):
        producer.flush()
    assert isinstance(lost.exception(0), TopicNotFoundError)
    with pytest.raises(TopicNotFoundError):
        producer.send("c")
    internals.topics(client).create(TOPIC, 1, "marker", TopicOptions())
    make().send("d").result(20)
    with internals.status(client).read() as cur:
        assert len(cur.execute("SELECT * FROM producer_states").fetchall()) == 1


# -- what is kept ------------------------------------------------------------------------


def test_the_state_of_a_producer_does_not_grow(client: txnkv.Client, topic: TopicInfo) -> None:
    by = sender(client)
    sizes = set()
    for i in range(20):
        deliver(by, *(f"{i}-{j}" for j in range(i + 1)))
        with internals.status(client).read() as cur:
            sizes.add(len(cur.execute("SELECT state FROM producer_states").fetchall()[0][0]))
    assert max(sizes) == 16 + 5 * 32
    assert rows(client) == (1, 1)


def test_idle_producers_are_forgotten(
    by_hand: Any, client: txnkv.Client, topic: TopicInfo, now: Any
) -> None:
    idle = sender(client, "idle")
    used = sender(client, "used")
    nameless = sender(client, None)
    for by in (idle, used, nameless):
        deliver(by, "a")
    now.forward(23 * 3600)
    deliver(used, "b")
    assert (sweep(client), rows(client)) == (0, (3, 3))
    now.forward(2 * 3600)
    assert (sweep(client), rows(client)) == (2, (3, 1))
    deliver(idle, "c")  # it goes on where it was
    now.forward(7 * 86_400)
    sweep(client)
    assert rows(client) == (0, 0)
    deliver(used, "d")
    deliver(nameless, "e")
    assert rows(client) == (2, 2)
    assert len(values(client, TOPIC)) == 7


@pytest.mark.parametrize(
    ("days", "back"),
    [(1, 0), (8, 0), (1, -21_000)],
    ids=["its state", "its name", "its state, then the clock is before 2020"],
)
def test_a_clock_that_was_ahead_forgets_a_producer_that_goes_on(
    by_hand: Any, client: txnkv.Client, topic: TopicInfo, now: Any, days: int, back: int
) -> None:
    """By a clock that was right again nothing could have been forgotten, yet nothing was known."""
    for name in ("p", None):
        by = sender(client, name)
        deliver(by, "a")
        now.ahead = days * 86_400 + 60
        assert sweep(client)
        now.ahead = back * 86_400
        deliver(by, "b")
        back_to(by, {topic.partitions[0]: 5})
        with pytest.raises(OutOfOrderSequenceError):  # from here on it is known again
            deliver(by, "d")
    assert values(client, TOPIC) == [b"a", b"b"] * 2


def test_the_leader_forgets_idle_producers_by_itself(
    by_hand: Any, client: txnkv.Client, topic: TopicInfo, now: Any
) -> None:
    deliver(sender(client), "a")
    by_hand(client)
    assert rows(client) == (1, 1)
    now.forward(86_400 + 60)
    by_hand(client)
    assert rows(client) == (1, 0)


def test_an_elder_stays_fenced_while_the_name_is_known(
    by_hand: Any, client: txnkv.Client, topic: TopicInfo, now: Any
) -> None:
    elder = sender(client)
    deliver(elder, "a")
    deliver(sender(client), "b")
    now.forward(2 * 86_400)
    sweep(client)
    with pytest.raises(ProducerFencedError):
        deliver(elder, "zombie")


@pytest.mark.parametrize(
    ("options", "error"),
    [({"name": ""}, ValueError), ({"name": 3}, ValueError), ({"linger": -1}, ValueError),
     ({"batch_bytes": 0}, ValueError), ({"batch_bytes": math.nan}, ValueError),
     ({"linger": math.nan}, ValueError), ({"linger": math.inf}, ValueError),
     ({"linger": None}, TypeError), ({"patience": math.nan}, ValueError),
     ({"name": "\ud800"}, ValueError)],
)  # fmt: skip
def test_arguments(options: dict[str, Any], error: type[Exception], make: Make) -> None:
    with pytest.raises(error):
        make(**options)


@pytest.mark.parametrize(
    ("message", "error"),
    [((3,), TypeError), (("v", 4), TypeError), (("v", None, "0"), TypeError),
     (("v", None, None, 7), TypeError),
     (("v", None, None, None, datetime(2026, 1, 1)), ValueError)],
)  # fmt: skip
def test_what_is_no_message_is_refused_at_the_call(
    message: tuple[Any, ...], error: type[Exception], make: Make
) -> None:
    with pytest.raises(error):
        make().send(*message)


def test_what_came_since_is_not_taken_back(client: txnkv.Client) -> None:
    """The producer has sent another batch since its last one was looked at."""
    first, second = (producers.SentBatch(n, n, n, n, 5) for n in (0, 1))
    topic = client.create_topic("o", partitions=1).info
    with internals.status(client).write() as cur:
        id = producers.register(cur, topic.id, None, 5).id
        (part,) = topic.partitions
        for state, taken, left in [
            ((first, second), first, (first, second)),
            ((first, second), second, (first,)),
            ((first,), second, (first,)),
            ((first,), first, None),
        ]:
            producers.save(cur, id, part, producers.ProducerState(3, state, 5))
            producers.take_back(cur, id, part, taken)
            found = producers.find(cur, id, part)
            assert (None if found is None else found.batches) == left
