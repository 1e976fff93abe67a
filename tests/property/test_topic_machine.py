"""Topics against plain lists, under random use: both buffers, every isolation and order.

Transactions small and large interleave over two partitions, commit, abort, grow large, run out of
time; other processes die in the middle of one; the tail is flushed, the leader makes its rounds
and dies in a sweep, the log is truncated, the store closed and opened. The model is three lists:
what was appended to a partition, what was committed, what is open. After every step each kind of
reader, new ones and those that have read all the time, was given exactly what the lists say.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import txnkv
from tests import internals
from tests.property.machine_tools import in_child
from tests.topics.reading_tools import partition_of
from tools.crash import run_out, settle
from tools.topic_writers import abort, batch, begin, commit, send, small
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage.faults import FAULT_POINTS, arm, disarm
from txnkv.topics.sidecar import side_store, side_sweep
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import append

PARTITIONS = 2
KINDS = ("uncommitted", "committed", "commits", "whole")
CHOSEN = st.sets(st.integers(0, PARTITIONS - 1), min_size=1)
COUNTS = st.integers(1, 3)
POINTS = (
    "append.", "marker.", "commit.", "log.", "status.", "lmdb.", "partition.", "side."
)  # fmt: skip
SWEPT = ("side.moving", "side.compacted", "side.removed", "side.dropped")


class Dead(Exception):
    """Raised where a process would die."""


def die_here() -> None:
    raise Dead


@dataclass(eq=False)
class Sent:
    """A transaction: what it sent to each partition."""

    row: Any = None
    values: dict[int, list[bytes]] = field(default_factory=dict)


class Model:
    """Messages appended and committed. `sidecar`: only committed messages are appended."""

    def __init__(self, sidecar: bool) -> None:
        self.sidecar = sidecar
        self.log: list[list[tuple[Sent, bytes]]] = [[] for _ in range(PARTITIONS)]
        self.commits: list[Sent] = []
        self.open: list[Sent] = []

    def sent(self, txn: Sent, partition: int, values: list[bytes]) -> None:
        txn.values.setdefault(partition, []).extend(values)
        if not self.sidecar:
            self.log[partition] += [(txn, value) for value in values]

    def committed(self, txn: Sent, *, appended: bool = True) -> None:
        if self.sidecar or not appended:
            for partition, values in txn.values.items():
                self.log[partition] += [(txn, value) for value in values]
        self.commits.append(txn)

    def cut(self, partition: int, gone: set[bytes]) -> None:
        self.log[partition] = [item for item in self.log[partition] if item[1] not in gone]
        for txn in self.commits:
            if partition in txn.values:
                txn.values[partition] = [v for v in txn.values[partition] if v not in gone]

    def expected(self, kind: str, partition: int) -> list[bytes]:
        """Return the messages that a reader is given of a partition."""
        items = self.log[partition]
        if kind == "uncommitted":
            return [value for _, value in items]
        if kind == "committed":
            stable = next((i for i, (txn, _) in enumerate(items) if txn in self.open), len(items))
            return [value for txn, value in items[:stable] if txn in self.commits]
        return [value for txn in self.commits for value in txn.values.get(partition, ())]

    def whole(self) -> list[tuple[int, bytes]]:
        """Return the messages that a serializable reader is given, with their partitions."""
        return [
            (partition, value)
            for txn in self.commits
            for partition, values in sorted(txn.values.items())
            for value in values
        ]


@dataclass
class Reading:
    """A consumer and what it was given."""

    kind: str
    consumer: Any
    given: list[tuple[int, bytes]] = field(default_factory=list)
    places: list[tuple[dict[int, int], int]] = field(default_factory=list)

    def poll(self, most: int) -> bool:
        messages = self.consumer.poll(max_messages=most, timeout=0)
        assert len(messages) <= most
        self.given += [(m.partition, m.value) for m in messages]
        return bool(messages)

    def drain(self, most: int = 500) -> None:
        while self.poll(most):
            pass
        places = {number: self.consumer.position(number) for number in range(PARTITIONS)}
        self.places.append((places, len(self.given)))


class TopicMachine(RuleBasedStateMachine):
    buffer = "marker"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="txnkv-topics-"))
        self.model = Model(self.buffer == "sidecar")
        self.number = 0
        self.client = txnkv.connect(self.folder / "store")
        options = TopicOptions(segment_bytes=2000)
        internals.topics(self.client).create("events", PARTITIONS, self.buffer, options)
        self.begin_reading()

    def teardown(self) -> None:
        try:
            for txn in self.model.open:
                abort(self.client, txn.row)
            self.model.open = []
            settle(self.client)
            self.readers_were_given_it_all()
            assert self.client.check().problems == []
            self.client.close()
        finally:
            shutil.rmtree(self.folder)

    # -- tools -------------------------------------------------------------------------

    @property
    def topic(self) -> Any:
        return self.client.topic("events")

    def partition(self, number: int) -> Any:
        return partition_of(self.client, self.topic, number)

    def consumer(self, kind: str, **options: Any) -> Any:
        if kind == "whole":
            return self.topic.consumer("serializable", **options)
        if kind == "commits":
            return self.topic.consumer(order="commit", **options)
        return self.topic.consumer(f"read_{kind}", **options)

    def begin_reading(self) -> None:
        self.readings = [Reading(kind, self.consumer(kind)) for kind in KINDS]

    def values(self, count: int) -> list[bytes]:
        """Short and long ones, so that a few of them fill a segment."""
        self.number += count
        return [b"%d" % i + b"." * (i % 5 * 45) for i in range(self.number - count, self.number)]

    # -- what is done ------------------------------------------------------------------

    @rule(chosen=CHOSEN, count=COUNTS)
    def commit_a_small_one(self, chosen: set[int], count: int) -> None:
        values = self.values(count)
        small(self.client, [self.partition(number) for number in sorted(chosen)], values)
        self.model.committed(Sent(None, {n: list(values) for n in chosen}), appended=False)

    @rule(chosen=CHOSEN, before=COUNTS, behind=st.integers(0, 3), end=st.booleans())
    def grow(self, chosen: set[int], before: int, behind: int, end: bool) -> None:
        """A transaction of the client that grows large on its way, and ends at once."""
        txn = self.client.new_transaction()
        sent = Sent()
        for count in (before, behind):
            values = self.values(count)
            for number in sorted(chosen):
                for value in values:
                    txn.send("events", value, partition=number)
                self.model.sent(sent, number, values)
            txn.flush()
            txn.serialize()
        if end:
            txn.commit()
            self.model.committed(sent)
        else:
            txn.rollback()

    @rule(count=COUNTS, where=st.integers(0, PARTITIONS - 1))
    def append_alone(self, count: int, where: int) -> None:
        values = self.values(count)
        engine = internals.topics(self.client)
        append.append_alone(engine, self.partition(where), [batch([value]) for value in values])
        self.model.committed(Sent(None, {where: values}), appended=False)

    @precondition(lambda self: len(self.model.open) < 4)
    @rule(timeout=st.sampled_from([60.0, None]))
    def begin(self, timeout: float | None) -> None:
        self.model.open.append(Sent(begin(self.client, timeout)))

    @precondition(lambda self: self.model.open)
    @rule(data=st.data(), where=st.integers(0, PARTITIONS - 1), count=COUNTS)
    def send(self, data: Any, where: int, count: int) -> None:
        txn = data.draw(st.sampled_from(self.model.open))
        values = self.values(count)
        send(self.client, txn.row, self.partition(where), values)
        self.model.sent(txn, where, values)

    @precondition(lambda self: self.model.open)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        txn = data.draw(st.sampled_from(self.model.open))
        commit(self.client, txn.row)
        self.model.open.remove(txn)
        self.model.committed(txn)

    @precondition(lambda self: self.model.open)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        txn = data.draw(st.sampled_from(self.model.open))
        abort(self.client, txn.row)
        self.model.open.remove(txn)
        with pytest.raises(txnkv.InvalidTxnStateError):
            send(self.client, txn.row, self.partition(0), [b"late"])

    @precondition(lambda self: self.model.open)
    @rule()
    def time_out(self) -> None:
        over, self.model.open = self.model.open, []
        run_out(self.client)
        with pytest.raises(txnkv.InvalidTxnStateError):
            send(self.client, over[0].row, self.partition(1), [b"late"])

    @rule()
    def flush(self) -> None:
        internals.flush(self.client)

    @rule()
    def look_after(self) -> None:
        internals.maintenance(self.client).round(resume_all=True)

    @precondition(lambda self: self.model.sidecar)
    @rule(point=st.sampled_from(SWEPT), where=st.integers(0, PARTITIONS - 1))
    def die_in_a_sweep(self, point: str, where: int) -> None:
        partition = self.partition(where)
        arm(point, die_here)
        try:
            partition.side.sweep(partition.log)
        except Dead:
            pass
        finally:
            disarm(point)

    @precondition(lambda self: not self.model.open)
    @rule()
    def reopen(self) -> None:
        for reading in self.readings:
            reading.drain()
        self.client.close()
        self.client = txnkv.connect(self.folder / "store")
        for reading in self.readings:
            reading.consumer = self.consumer(reading.kind, start=reading.places[-1][0])

    @precondition(lambda self: not self.model.open)
    @rule(where=st.integers(0, PARTITIONS - 1), part=st.floats(0, 1))
    def truncate(self, where: int, part: float) -> None:
        reading = self.consumer("uncommitted", partitions=[where])
        held = []
        while messages := reading.poll(timeout=0):
            held += messages
        offset = int(part * self.topic.end_offsets()[where])
        try:
            self.topic.truncate(after={where: offset - 1})
        except (txnkv.InvalidTxnStateError, txnkv.OffsetOutOfRangeError):
            return  # it would cut a transaction from its end, or in pieces
        self.model.cut(where, {m.value for m in held if m.offset >= offset})
        self.begin_reading()

    @rule(
        point=st.sampled_from(sorted(p for p in FAULT_POINTS if p.startswith(POINTS))),
        hit=st.integers(1, 3),
        large=st.booleans(),
        chosen=CHOSEN,
        count=COUNTS,
    )
    def die(self, point: str, hit: int, large: bool, chosen: set[int], count: int) -> None:
        """Another process dies while it sends and commits: all of it is there, or nothing."""
        values = self.values(count)
        numbers = sorted(chosen)
        path = self.folder / "store"

        def work(say: Any) -> None:
            client = txnkv.connect(path)
            topic = client.topic("events")
            partitions = [partition_of(client, topic, number) for number in numbers]
            if large:
                row = begin(client, timeout=60)
                for partition in partitions:
                    send(client, row, partition, values)
                commit(client, row)
            else:
                small(client, partitions, values)
            say(True)

        returned = bool(in_child(work, point, hit))
        others = {id(txn) for txn in self.model.open}
        self.settle_the_dead()
        assert others == {id(txn) for txn in self.model.open}
        seen = self.read_new("commits")
        found = {n: [v for at, v in seen if at == n and v in values] for n in numbers}
        is_there = found[numbers[0]] == values
        assert all(found[n] == (values if is_there else []) for n in numbers)
        assert is_there or not returned
        txn = Sent(None, {n: list(values) for n in numbers})
        if self.buffer == "marker":
            # What it appended and nobody committed stays in the log, as of an aborted one.
            everything = self.read_new("uncommitted")
            for n in numbers:
                self.model.log[n] += [(txn, v) for at, v in everything if at == n and v in values]
        elif is_there:
            for n in numbers:
                self.model.log[n] += [(txn, value) for value in values]
        if is_there:
            self.model.commits.append(txn)

    def settle_the_dead(self) -> None:
        """End transactions that nobody keeps alive, but those of this process."""
        rows = {txn.row.txn_id for txn in self.model.open}
        coordinator = internals.coordinator(self.client)
        coordinator.maintenance.round(resume_all=True)
        for info in self.client.transactions():
            if info.state is txnkv.TxnState.OPEN and info.id.local not in rows:
                self.client.abort_transaction(info.id)

    # -- what is seen ------------------------------------------------------------------

    def read_new(
        self, kind: str, most: int = 500, max_bytes: int = 1 << 20
    ) -> list[tuple[int, bytes]]:
        reading = Reading(kind, self.consumer(kind))
        for reader in reading.consumer._readers.values():
            reader._max_bytes = max_bytes
        reading.drain(most)
        return reading.given

    def same(self, kind: str, given: list[tuple[int, bytes]], *, prefix: bool = False) -> None:
        if kind == "whole":
            expected = self.model.whole()
            assert given == (expected[: len(given)] if prefix else expected)
            return
        for number in range(PARTITIONS):
            mine = [value for partition, value in given if partition == number]
            there = self.model.expected(kind, number)
            assert mine == (there[: len(mine)] if prefix else there), (kind, number)

    @rule(
        kind=st.sampled_from(KINDS),
        most=st.sampled_from([1, 2, 5, 500]),
        max_bytes=st.sampled_from([1, 300, 1 << 20]),
    )
    def read_all(self, kind: str, most: int, max_bytes: int) -> None:
        self.same(kind, self.read_new(kind, most, max_bytes))

    @rule(data=st.data(), most=st.sampled_from([1, 3, 500]))
    def read_on(self, data: Any, most: int) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        reading.poll(most)
        self.same(reading.kind, reading.given, prefix=True)

    @rule(data=st.data(), most=st.sampled_from([2, 500]))
    def go_back(self, data: Any, most: int) -> None:
        """A reader goes back to where it was once, and is given the same from there on."""
        reading = data.draw(st.sampled_from(self.readings))
        reading.drain()
        places, count = data.draw(st.sampled_from(reading.places))
        for number, offset in places.items():
            reading.consumer.seek(number, offset)
        again = Reading(reading.kind, reading.consumer, reading.given[:count])
        again.drain(most)
        self.same(reading.kind, again.given)
        # Partitions may take turns otherwise this time: later counts are of another order.
        reading.places = [place for place in reading.places if place[1] <= count]
        reading.given = again.given

    @invariant()
    def ends_are_sound(self) -> None:
        ends, stable = self.topic.end_offsets(), self.topic.last_stable_offsets()
        for number in range(PARTITIONS):
            assert stable[number] <= ends[number]
            assert self.topic.fetch(number, ends[number]).records == b""

    def readers_were_given_it_all(self) -> None:
        for reading in self.readings:
            reading.drain()
            self.same(reading.kind, reading.given)
        for kind in KINDS:
            self.same(kind, self.read_new(kind))


class SidecarMachine(TopicMachine):
    buffer = "sidecar"


MACHINES = [TopicMachine, SidecarMachine]
FEW = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # made smaller in the long run alone
    max_examples=6,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
MANY = settings(FEW, max_examples=500, stateful_step_count=60, phases=tuple(Phase))


@pytest.fixture(autouse=True)
def _no_rounds_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


@pytest.fixture(autouse=True)
def _few_bytes_pass_through_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_store, "OWN_BYTES", 1500)
    monkeypatch.setattr(side_sweep, "COMPACT_BYTES", 400)


@pytest.mark.parametrize("machine", MACHINES)
def test_topics_do_what_the_model_does(machine: type[TopicMachine]) -> None:
    run(machine, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_topics_do_what_the_model_does_for_long(machine: type[TopicMachine]) -> None:
    run(machine, MANY)


def run(machine: type[TopicMachine], chosen: settings) -> None:
    case = machine.TestCase
    case.settings = chosen
    case("runTest").runTest()
