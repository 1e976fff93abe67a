"""A key_shared subscription under random use: two processes, consumers that come and go.

Messages of a few keys are sent, taken, acknowledged plainly and in transactions, and given back, by
up to four consumers, half of them in another process, that join and leave in any order. The model
has for each message whose it is. Whatever is delivered is nobody else's, of a key of which nobody
else has a message, and behind nothing of its key that waits; and at the end each was done once.

The query for leases that are due is the same as one that looks at each by itself, and takes steps
by how many there are.
"""

from __future__ import annotations

import base64
import itertools
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import txnkv
from tests import internals
from txnkv.topics.delivery.key_shared import due_leases
from txnkv.topics.delivery.redelivery import FOR_EVER
from txnkv.topics.subscription_catalog import DELAYED

KEYS = ("a", "b", "c", "d", "e")
PARTITIONS = 2
WHO = st.integers(0, 3)
SOME = st.integers(0, 1 << 20)
OPTIONS: dict[str, Any] = {"type": "key_shared", "lease_seconds": 3600}

_CHILD = """
import base64, pickle, sys
import txnkv
from txnkv.topics.messages.message import MessageId
client = txnkv.connect(sys.argv[1], create=False)
subs = {}
txns = {}
for line in sys.stdin:
    what, who, *more = pickle.loads(base64.b64decode(line))
    answer = None
    if what == "join":
        subs[who] = client.topic(more[0]).subscribe("s", **more[1])
    elif what == "leave":
        subs.pop(who).close()
    elif what == "take":
        found = subs[who].receive_many(more[0], timeout=0)
        answer = [(m.partition, m.offset, m.key, m.value) for m in found]
    elif what in ("ack", "nack"):
        getattr(subs[who], what)([MessageId(*id) for id in more[0]])
    elif what == "begin":
        txns[who] = client.new_transaction(timeout=None)
        txns[who].ack(subs[who], [MessageId(*id) for id in more[0]])
    else:
        getattr(txns.pop(who), what)()
    print(base64.b64encode(pickle.dumps(answer)).decode(), flush=True)
"""


class Process:
    """A process with consumers of the store's topics."""

    def __init__(self, path: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: Any) -> Any:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(base64.b64encode(pickle.dumps(words)).decode() + "\n")
        self.popen.stdin.flush()
        return pickle.loads(base64.b64decode(self.popen.stdout.readline()))

    def end(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        assert self.popen.wait(60) == 0


class Machine(RuleBasedStateMachine):
    """Consumers 0 and 1 are of one process, 2 and 3 of the other."""

    client: txnkv.Client
    processes: tuple[Process, Process]
    names = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.topic = f"t{next(self.names)}"
        buffer = ("marker", "sidecar")[next(self.names) // 2 % 2]
        self.client.create_topic(self.topic, partitions=PARTITIONS, buffer=buffer)  # type: ignore[arg-type]
        self.sent: dict[str, int] = dict.fromkeys(KEYS, 0)
        self.ids: dict[tuple[str, int], tuple[int, int]] = {}
        self.state: dict[tuple[str, int], Any] = {}  # "new", "back", "done" or who has it
        self.pending: dict[int, list[tuple[str, int]]] = {}
        self.live: set[int] = set()

    def ask(self, what: str, who: int, *more: Any) -> Any:
        return self.processes[who // 2](what, (self.topic, who), *more)

    def held(self, who: int) -> list[tuple[str, int]]:
        waits = self.pending.get(who, [])
        return [at for at, state in self.state.items() if state == who and at not in waits]

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8), stored=st.booleans())
    def send(self, keys: list[str], stored: bool) -> None:
        with self.client.transaction() as txn:
            if stored:
                txn.serialize()
            for key in keys:
                txn.send(self.topic, str(self.sent[key]), key=key)
                self.state[key, self.sent[key]] = "new"
                self.sent[key] += 1

    @precondition(lambda self: len(self.live) < 4)
    @rule(who=WHO)
    def join(self, who: int) -> None:
        if who not in self.live:
            self.ask("join", who, self.topic, OPTIONS)
            self.live.add(who)

    @precondition(lambda self: self.live)
    @rule(who=WHO)
    def leave(self, who: int) -> None:
        if who in self.live and who not in self.pending:
            self.ask("leave", who)
            self.live.discard(who)
            for at in self.held(who):
                self.state[at] = "back"

    @precondition(lambda self: self.live)
    @rule(who=WHO, most=st.integers(1, 10))
    def take(self, who: int, most: int) -> None:
        if who in self.live:
            self.delivered(who, self.ask("take", who, most))

    def delivered(self, who: int, found: list[Any]) -> None:
        for partition, offset, key, value in found:
            at = key.decode(), int(value)
            assert self.ids.setdefault(at, (partition, offset)) == (partition, offset)
            assert self.state[at] in ("new", "back"), f"{at} is {self.state[at]}"
            of_key = [(n, state) for (k, n), state in self.state.items() if k == at[0]]
            others = [n for n, state in of_key if isinstance(state, int) and state != who]
            assert not others, f"{at} goes to {who}, and another has {others}"
            waiting = [n for n, state in of_key if state in ("new", "back") and n < at[1]]
            assert not waiting, f"{at} goes before {waiting}"
            self.state[at] = who

    def some(self, who: int, which: int) -> list[tuple[str, int]]:
        held = self.held(who)
        return [at for bit, at in enumerate(held) if which >> bit % 20 & 1]

    @precondition(lambda self: self.live)
    @rule(who=WHO, which=SOME, what=st.sampled_from(["ack", "nack"]))
    def end(self, who: int, which: int, what: str) -> None:
        some = self.some(who, which)
        if who in self.live and some:
            self.ask(what, who, [self.ids[at] for at in some])
            for at in some:
                self.state[at] = "done" if what == "ack" else "back"

    @precondition(lambda self: self.live)
    @rule(who=WHO, which=SOME)
    def begin(self, who: int, which: int) -> None:
        some = self.some(who, which)
        if who in self.live and some and who not in self.pending:
            self.ask("begin", who, [self.ids[at] for at in some])
            self.pending[who] = some

    @precondition(lambda self: self.pending)
    @rule(which=SOME, what=st.sampled_from(["commit", "rollback"]))
    def end_transaction(self, which: int, what: str) -> None:
        who = sorted(self.pending)[which % len(self.pending)]
        self.ask(what, who)
        for at in self.pending.pop(who):
            self.state[at] = "done" if what == "commit" else "back"

    def teardown(self) -> None:
        while self.pending:
            self.end_transaction(0, "rollback")
        # Whoever is left gets all that is its own; the last one gets the rest.
        for who in sorted(self.live):
            while found := self.ask("take", who, 5):
                self.delivered(who, found)
                self.end(who, (1 << 20) - 1, "ack")
            self.end(who, (1 << 20) - 1, "ack")
            self.leave(who)
        self.join(0)
        while found := self.ask("take", 0, 5):
            self.delivered(0, found)
            self.end(0, (1 << 20) - 1, "ack")
        self.leave(0)
        left = [at for at, state in self.state.items() if state != "done"]
        assert not left, f"{left} were not delivered"
        with self.client.topic(self.topic).subscribe("s", **OPTIONS) as sub:
            assert sub.lag() == dict.fromkeys(range(PARTITIONS), 0)


def run(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    folder = Path(tempfile.mkdtemp())
    try:
        with txnkv.connect(folder / "store") as client:
            processes = Process(folder / "store"), Process(folder / "store")
            made = type("Made", (Machine,), {"client": client, "processes": processes})
            run_state_machine_as_test(
                made,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
            assert client.check().problems == []
            for process in processes:
                process.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_short() -> None:
    run(15, 40)


@pytest.mark.slow
def test_long() -> None:
    run(300, 120)


# -- the query for what is due ---------------------------------------------------------

NOW = 1000
MINE = "{0}.slot IS NOT NULL AND {0}.slot = ?2 AND {0}.start = ?3 AND {0}.consumer = ?4"

EACH_BY_ITSELF = f"""
SELECT partition_id, message, deliveries, slot FROM leases AS due
WHERE subscription_id = ?1 AND until BETWEEN ?6 AND ?7 AND key_hash BETWEEN ?8 AND ?9
AND NOT EXISTS (
    SELECT 1 FROM leases AS other
    WHERE other.subscription_id = ?1 AND other.key_hash = due.key_hash AND (
        other.slot IS NOT NULL AND ifnull(other.until, {FOR_EVER}) > ?5
        AND NOT ({MINE.format("other")})
        OR other.slot IS NULL AND other.until IS NULL
        OR other.slot IS NULL AND other.until > ?5 AND other.until < {DELAYED}
        AND other.partition_id = due.partition_id AND other.message < due.message
    )
) ORDER BY partition_id, message
"""


def fill(cur: apsw.Cursor, rows: list[tuple[Any, ...]]) -> None:
    """Have these leases: subscription, partition, message, holder, until and key."""
    cur.execute("DELETE FROM leases")
    cur.executemany(
        "INSERT INTO leases (subscription_id, partition_id, message, first, deliveries, slot, "
        "start, consumer, until, key_hash) VALUES (?, ?, ?, 0, 1, ?, ?, ?, ?, ?)",
        rows,
    )


def test_due_is_what_a_look_at_each_finds(client: txnkv.Client) -> None:
    topic = client.create_topic("t", partitions=2)
    infos = [topic.subscribe(name, **OPTIONS).info for name in ("s", "other")]
    holders = [(None,) * 3] * 3 + [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    untils = [None, NOW + 1, NOW + 50, FOR_EVER, DELAYED, DELAYED + NOW, DELAYED + NOW + 1]
    untils += [0] * 4 + [5, NOW]
    some, found = random.Random(9), 0
    with internals.status(client).write(sync=False) as cur:
        for _ in range(400):
            rows = [
                (info.id, id, n, *some.choice(holders), some.choice(untils), some.randrange(4))
                for info in infos
                for id in info.topic.partitions
                for n in range(some.randrange(8))
            ]
            fill(cur, rows)
            for span in ((0, NOW), (DELAYED, DELAYED + NOW)):
                for part in ((0, 9), (1, 2)):
                    at, most = (infos[0].id, 1, 1, 1, NOW), some.choice((1, 3, 99))
                    due = due_leases(cur, at, span, range(part[0], part[1] + 1), most)
                    wanted = cur.execute(EACH_BY_ITSELF, (*at, *span, *part)).fetchall()
                    assert len(due) == min(most, len(wanted)), rows
                    keys = {row[1:3]: row[-1] for row in rows if row[0] == infos[0].id}
                    for key in {keys[each[:2]] for each in due}:
                        taken, there = (
                            [each for each in those if keys[each[:2]] == key]
                            for those in (due, wanted)
                        )
                        assert taken == there[: len(taken)], rows
                    found += len(due)
        fill(cur, [])
    assert found > 1000


def steps_of(cur: apsw.Cursor, id: int, most: int) -> tuple[int, int]:
    """Hundreds of SQLite's steps for what is due, and how many were found."""
    ticks: list[None] = []
    cur.connection.set_progress_handler(lambda: bool(ticks.append(None)), 100)  # goes on
    try:
        found = due_leases(cur, (id, 1, 1, 1, NOW), (0, NOW), range(10_000), most)
    finally:
        cur.connection.set_progress_handler(None)
    return len(ticks), len(found)


@pytest.mark.parametrize("how", ["free", "held", "waiting"])
def test_due_takes_steps_by_how_many_there_are(client: txnkv.Client, how: str) -> None:
    info = client.create_topic("t").subscribe("s", **OPTIONS).info
    at, nobody, steps = (info.id, info.topic.partitions[0]), (None,) * 3, []
    with internals.status(client).write(sync=False) as cur:
        for count in (500, 2000):
            rows: list[tuple[Any, ...]] = [
                (*at, n, *nobody, NOW + 9 if how == "waiting" and n % 2 else 0, n // 2 % 5)
                for n in range(count)
            ]
            if how == "held":
                rows += [(*at, count + n, 1, 1, 2, NOW + 9, n) for n in range(5)]
            fill(cur, rows)
            took, found = steps_of(cur, info.id, 1)
            assert found == (how != "held")
            steps.append(took)
        fill(cur, [])
    assert steps[1] < 6 * steps[0], steps


def test_due_takes_steps_by_how_many_are_taken(client: txnkv.Client) -> None:
    """It took as many as came back, for each of them anew."""
    info = client.create_topic("t").subscribe("s", **OPTIONS).info
    at, nobody, steps = (info.id, info.topic.partitions[0]), (None,) * 3, []
    with internals.status(client).write(sync=False) as cur:
        for count in (200, 8000):
            fill(cur, [(*at, n, *nobody, 0, n // 2) for n in range(count)])
            took, found = steps_of(cur, info.id, 40)
            assert found == 40
            steps.append(took)
        fill(cur, [])
    assert steps[1] < 2 * steps[0] + 4, steps
