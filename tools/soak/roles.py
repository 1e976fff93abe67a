"""The work of the soak's processes, step by step, until they are told to stop or killed."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa

import txnkv
from tools.soak.audit import auditor
from tools.soak.scene import ACCOUNTS, GENERATION, START, Place, connect, floor
from txnkv.storage import clock
from txnkv.storage.clocks import EPOCH_SECONDS
from txnkv.topics import SubscriptionType
from txnkv.transaction import Isolation

TOLERATED: Final = (
    txnkv.TransactionConflictError,
    txnkv.TransactionLockedError,
    txnkv.UnavailableError,
    txnkv.StorageFullError,
    # To whoever was stopped for longer than its heartbeats allow.
    txnkv.InvalidTxnStateError,
    txnkv.TxnNotFoundError,
    txnkv.CommitOutcomeUnknownError,
    txnkv.HistoryExpiredError,
    txnkv.ProducerFencedError,
)
"""Errors that kills, stops and full disks may lead to, and nothing else."""
_SEEN: Final = 300.0
"""Seconds that a commit of unknown outcome may take until its state is known."""


_AHEAD: Final = 60_000
"""Numbers under way, from which on a feeder waits."""


class DoubledError(Exception):
    """A number came a second time."""


def feeder(client: txnkv.Client, place: Place, chance: random.Random, chain: str) -> Step:
    """Sends numbers and inserts them, a few or thousands a transaction, and writes down which."""
    table, topic = client.table(f"sent_{chain}"), client.topic(f"orders_{chain}")
    following = _last(client, place, chain) + 1

    def step() -> None:
        nonlocal following
        with client.snapshot() as snapshot:
            ahead = following - floor(snapshot, chain)
        if ahead > _AHEAD:
            time.sleep(0.5)
            return
        first = following
        last = first + chance.choice((0, 0, 0, 9, 99, 4999))
        # Not again, whatever comes of it: a commit whose outcome is unknown may still be one.
        following = last + 1
        txn = client.new_transaction(timeout=30.0)
        try:
            with txn:
                if last - first > 1000:
                    numbers = pa.table({"number": pa.array(range(first, last + 1), pa.int64())})
                    txn.write(table, numbers)
                    txn.send_batch(topic, _messages(first, last))
                else:
                    for number in range(first, last + 1):
                        txn.insert(table, (number,))
                        txn.send(topic, str(number), key=str(number % 16))
                if chance.random() < 0.05:
                    txn.rollback()
                    return
        except txnkv.CommitOutcomeUnknownError:
            _await_end(client, txn.id)
            raise
        place.acknowledge(chain, first, last)

    return step


def _messages(first: int, last: int) -> pa.Table:
    texts = [str(number).encode() for number in range(first, last + 1)]
    keys = [str(number % 16).encode() for number in range(first, last + 1)]
    return pa.table({"value": pa.array(texts, pa.binary()), "key": pa.array(keys, pa.binary())})


def _last(client: txnkv.Client, place: Place, chain: str) -> int:
    """The last number that was ever used, as far as it can matter."""
    with client.snapshot() as snapshot:
        numbers = snapshot.scan(f"sent_{chain}").to_arrow()["number"].to_pylist()
        low = floor(snapshot, chain)
    written = (last for _, last in place.acknowledged(chain))
    # Room for what a predecessor that was killed had begun.
    return int(max([low, *numbers, *written])) + 10_000


def _await_end(client: txnkv.Client, id: txnkv.TxnId) -> None:
    ended = (txnkv.TxnState.COMMITTED, txnkv.TxnState.ABORTED)
    deadline = time.monotonic() + _SEEN
    while time.monotonic() < deadline:
        try:
            if client.transaction_state(id) in ended:
                return
        except (txnkv.TxnNotFoundError, txnkv.CommitOutcomeUnknownError):
            return
        except (txnkv.UnavailableError, txnkv.StorageFullError):
            pass
        time.sleep(0.5)


def biller(client: txnkv.Client, place: Place, chance: random.Random, chain: str) -> Step:
    """Bills orders that it shares with another, and writes receipts."""
    return _passing(client, chance, chain, ("orders", "billed", "receipts"), "shared")


def mailer(client: txnkv.Client, place: Place, chance: random.Random, chain: str) -> Step:
    """Mails receipts, alone at its subscription."""
    return _passing(client, chance, chain, ("receipts", "mailed", None), "failover")


def _passing(
    client: txnkv.Client,
    chance: random.Random,
    chain: str,
    names: tuple[str, str, str | None],
    type: SubscriptionType,
) -> Step:
    source, target = client.topic(f"{names[0]}_{chain}"), client.table(f"{names[1]}_{chain}")
    onward = client.topic(f"{names[2]}_{chain}") if names[2] else None
    subscription = source.subscribe(names[1], type=type)

    def step() -> None:
        messages = subscription.receive_many(chance.choice((1, 50, 2000)), timeout=1.0)
        if not messages:
            return
        _refuse_twice(messages)
        numbers = [int(message.value) for message in messages]

        def pass_on(txn: txnkv.Transaction) -> list[int]:
            if chance.random() < 0.1:
                txn.serialize()  # others could join it: it is a large one from here on
            low = floor(txn, chain)
            there = txn.get_many(target, numbers)["number"].to_pylist()
            again = []
            for number, known, message in zip(numbers, there, messages, strict=True):
                if known is not None or number <= low:
                    # Somebody got it after this one had held it for too long; then the
                    # acknowledgement is refused.
                    again.append(number)
                    continue
                txn.insert(target, (number,))
                if onward is not None:
                    txn.send(onward, message.value, key=message.key)
            txn.ack(subscription, messages)
            return again

        try:
            again = client.run(pass_on, timeout=10.0)
            if again:
                raise DoubledError(f"{target.name}: {again[:5]} were acknowledged twice")
        except BaseException:
            for message in messages:
                subscription.nack(message)
            raise

    return step


def _refuse_twice(messages: Sequence[txnkv.Message]) -> None:
    """Refuse a message that is given twice by one call, and a number that was sent twice."""
    seen: dict[int, txnkv.Message] = {}
    for message in messages:
        other = seen.setdefault(int(message.value), message)
        if other is not message:
            raise DoubledError(f"{other!r} and {message!r} came by one call")


def banker(client: txnkv.Client, place: Place, chance: random.Random, chain: str) -> Step:
    """Moves money; the sum stays."""

    def step() -> None:
        giver, taker = chance.sample(range(ACCOUNTS), 2)
        amount = chance.randint(1, 50)

        def move(txn: txnkv.Transaction) -> None:
            for id, change in ((giver, -amount), (taker, amount)):
                row = txn.get("accounts", id)
                assert row is not None
                txn.update("accounts", {"id": id, "balance": row["balance"] + change})

        isolation: Isolation = chance.choice(("snapshot", "serializable"))
        client.run(move, isolation=isolation, timeout=10.0)

    return step


def loader(client: txnkv.Client, place: Place, chance: random.Random, chain: str) -> Step:
    """Puts one generation of rows in the place of another, by batch, all or nothing."""

    def step() -> None:
        with client.transaction(timeout=30.0) as txn:
            txn.write("loaded", generation(chance.randrange(1 << 30)), "upsert")
            if chance.random() < 0.2:
                txn.rollback()
        time.sleep(0.5)

    return step


def generation(number: int) -> pa.Table:
    """The rows of one generation."""
    ids = pa.array(range(GENERATION), pa.int64())
    return pa.table({"id": ids, "generation": pa.array([number] * GENERATION, pa.int64())})


def keeper(client: txnkv.Client, place: Place, chance: random.Random, chain: str) -> Step:
    """Compacts, checks, and makes and drops tables and topics."""
    number = time.time_ns()

    def come_and_go() -> None:
        nonlocal number
        number += 1
        schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
        table, topic = f"passing{number}", f"passing{number}"
        client.create_table(table, schema)
        client.create_topic(topic)
        with client.transaction() as txn:
            txn.insert(table, (1,))
            txn.send(topic, "1")
        client.compact()
        client.drop_table(table)
        client.drop_topic(topic)

    def check() -> None:
        report = client.check()
        if not report.ok:
            raise AssertionError(f"check: {report}")

    def forget() -> None:
        """Drop what one who was killed had made."""
        for name in client.tables():
            if name.startswith("passing"):
                client.drop_table(name, missing_ok=True)
        for name in client.topics():
            if name.startswith("passing"):
                client.drop_topic(name, missing_ok=True)

    forget()

    def step() -> None:
        chance.choice((client.compact, come_and_go, come_and_go, check))()
        time.sleep(chance.random() * 2)

    return step


def looker(client: txnkv.Client, place: Place, chance: random.Random, chain: str) -> Step:
    """Reads the accounts as they were some seconds ago, and holds a snapshot for a while."""

    def step() -> None:
        with client.snapshot() as snapshot:
            for _ in range(chance.randint(1, 10)):
                balances = snapshot.scan("accounts").to_arrow()["balance"].to_pylist()
                if sum(balances) != ACCOUNTS * START:
                    raise AssertionError(f"the sum of {balances} is not {ACCOUNTS * START}")
                time.sleep(0.3)

    return step


Step = Callable[[], None]
Role = Callable[[txnkv.Client, Place, random.Random, str], Step]
ROLES: Final[dict[str, Role]] = {
    each.__name__: each
    for each in (feeder, biller, mailer, banker, loader, keeper, looker, auditor)
}


def run(arguments: Sequence[str]) -> None:
    """Do one role until SIGTERM: `KIND CHAIN NUMBER FOLDER SEED`."""
    kind, chain, number, folder, seed = arguments
    place = Place(Path(folder))
    name = f"{kind}-{chain}-{number}"
    with off_clock(place, name), reported(place, name):
        chance = random.Random(f"{name} {seed}")
        go_on(place, name, lambda client: ROLES[kind](client, place, chance, chain))


def go_on(place: Place, name: str, prepare: Callable[[txnkv.Client], Step]) -> None:
    """Take steps until SIGTERM; begin anew after an error that is to be expected."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    while not over.is_set():
        try:
            with connect(place) as client:
                step = prepare(client)
                while not over.is_set():
                    step()
                    place.beat(name).touch()
        except TOLERATED as error:
            with place.tolerated().open("a") as file:
                file.write(f"{name}: {type(error).__name__}: {error}\n")
            over.wait(0.2)


@contextmanager
def reported(place: Place, name: str) -> Iterator[None]:
    """Write an error that nothing explains into the folder of errors."""
    try:
        yield
    except Exception:
        (place.errors / f"{name}-{time.time_ns()}").write_text(traceback.format_exc())
        raise


@contextmanager
def off_clock(place: Place, name: str) -> Iterator[None]:
    """Have the wall clock of this process be off by what a file says, read now and again."""
    file = place.clock(name)
    read_at, micros = 0.0, 0

    def now() -> int:
        nonlocal read_at, micros
        if time.monotonic() > read_at + 0.5:
            read_at = time.monotonic()
            try:
                micros = int(float(file.read_text() or 0) * 1e6)
            except FileNotFoundError:
                micros = 0
        return time.time_ns() // 1000 - EPOCH_SECONDS * 1_000_000 + micros

    with clock.replaced(wall=now):
        yield


if __name__ == "__main__":
    run(sys.argv[1:])
