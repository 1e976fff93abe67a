"""The begin of transactions: of one `client.run`, one after the other until one commits; and of
those that have a name.

**Names.** At most one transaction of a name is open: who begins another one ends it. The row of a
name in the table `transaction_names` says whose it is, and names its last transaction, open or
ended:

    client A   begin "billing"    no row yet: A's, epoch 0         row (1, 0, txn 10)
    client B   begin "billing"    not B's: the epoch rises;        row (1, 1, txn 11)
                                  10 is aborted before that
    client A   txn 10 commits     ProducerFencedError
               begin "billing"    its epoch is 0, and 1 is there: ProducerFencedError, for good
    client B   begin "billing"    11 is aborted if it is open      row (1, 1, txn 12)

The one before is at its end, and what it committed is visible, before the snapshot of the next one
is taken. The row is moved from what was seen to what is to be, in a transaction of its own: of two
who begin at once, one is the later one and ends the other. A transaction that begins and is killed
before the row names it has done nothing, and ends with its keepalive time.

This is the transactional id of Kafka, whose clients have the same names: number and epoch of a row
are those of the producer, and `via` says for whose clients it was claimed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, ModuleType
from typing import Any, Final, NamedTuple, TypeVar

from txnkv.client.table import Table
from txnkv.coordinator import PartIds, Timestamp, TxnState
from txnkv.errors import (
    CommitOutcomeUnknownError,
    ProducerFencedError,
    SchemaError,
    TransactionConflictError,
    TxnkvError,
    TxnNotFoundError,
    require_text,
)
from txnkv.storage import Contender, caller, shielded
from txnkv.tables import Partitioning, Schema
from txnkv.topics import Hold
from txnkv.transaction import DEFAULTS, Connection, Retries, Transaction

T = TypeVar("T")

# -- names -----------------------------------------------------------------------------

NAMES_TABLE: Final = "transaction_names"
_NAMES: Final = Schema(
    {"name": "string", "id": "int64", "epoch": "int32", "txn": "string?", "via": "string"},
    primary_key=["name"],
)
_MOST_EPOCH: Final = 32_766
"""Kafka's clients have 16 bits for it."""
_NUMBERS_BITS: Final = 40
"""For the numbers that one table gives to producers; the number of the table stands above."""

_Row = Mapping[str, Any] | None


class Claim(NamedTuple):
    """The right to begin transactions under a name, until the epoch rises.

    Attributes:
        id: the number of the producer.
        epoch: of this number.
    """

    id: int
    epoch: int


class NamedTransaction(Transaction):
    """A transaction under a name.

    Attributes:
        name: the name.
        claim: by which it was begun.
    """

    name: str = ""
    claim: Claim | None = None


def names_table(connection: Connection) -> Table:
    """Return the table of names; it is made at its first use.

    Raises:
        SchemaError: a program has one of its own of this name.
    """
    engine = connection.instance.engine
    found = engine.find(NAMES_TABLE)
    if found is None:
        found = engine.provide(NAMES_TABLE, _NAMES, Partitioning.of(_NAMES, None))
    return require_own(Table(connection, found), _NAMES, "names of transactions")


def require_own(table: Table, schema: Schema, whose: str) -> Table:
    """Return a table of this package.

    Raises:
        SchemaError: it is a program's own.
    """
    needed = {each for each, column in schema.columns.items() if not column.nullable}
    there = table.schema
    if there.primary_key != schema.primary_key or not needed <= {*there.names}:
        raise SchemaError(
            f"{whose} have their rows in a table {table.name!r}, and there is another one of "
            f"this name, with the columns {', '.join(there.names)}: rename it, "
            f"client.rename_table({table.name!r}, ...), and they make theirs"
        )
    return table


def producer_number(table: Table) -> int:
    """Return a number that no producer has or had: logs remember the batches of each.

    Args:
        table: of names; one that is made again counts from the start.
    """
    return (table.info.id << _NUMBERS_BITS) + table.next_id()


@shielded
def claim_name(
    connection: Connection, name: str, known: Claim | None = None, via: str = ""
) -> Claim:
    """Take over a name, or go on under it in the next epoch: what is open under it is ended.

    Args:
        connection: to the store.
        name: the name.
        known: the claim that is gone on from; None: it is taken over, whoever has it.
        via: for whose clients; "" for those of this package.

    Raises:
        ProducerFencedError: `known` is not the last one.
    """
    while True:
        table, row = _look(connection, name, known)
        claim = _following(table, row)
        if _move(connection, row, (name, *claim, None, via)):
            return claim


def begin_transaction(
    connection: Connection, options: Mapping[str, Any], **more: Any
) -> Transaction:
    """Begin a transaction.

    Args:
        connection: to the store.
        options: of `new_transaction`; beside a name perhaps `claims`, those of whoever begins, by
            name: this one's is put there. By default they are the connection's. And `via`, as
            `claim_name` has it; `seen`, the row of the name as far as the caller knows, where the
            claim is known and the last transaction has ended; and `parts`, participants by kind.
        **more: of `Transaction.begin`.

    Raises:
        ProducerFencedError: another one has taken the name over since it was claimed.
        ValueError: an option makes no sense.
    """
    rest = dict(options) | more
    name, claims = rest.pop("name", None), rest.pop("claims", connection.claims)
    told = _Begin(rest.pop("via", ""), rest.pop("seen", None), rest.pop("parts", {}))
    if name is None:
        return Transaction.begin(connection, **rest)
    if not isinstance(name, str) or not name:
        raise ValueError(f"a transaction's name is a non-empty string or None, not {name!r}")
    require_text("a transaction's name", name)
    if rest.get("spare") is not None:  # it may take several, of which the last one counts
        raise ValueError("a transaction with a name begins with no id that was given before")
    connection.require_writable()
    return _begin_named(connection, name, claims, told, rest)


class _Begin(NamedTuple):
    """The options of `begin_transaction` beside a name."""

    via: str
    seen: _Row
    parts: PartIds


@shielded
def _begin_named(
    connection: Connection,
    name: str,
    claims: MutableMapping[str, Claim],
    told: _Begin,
    options: Mapping[str, Any],
) -> NamedTransaction:
    claimed = claims is not connection.claims or name in claims
    # Another thread may claim it now, also for who was interrupted.
    with nullcontext() if claimed else connection.claiming:
        known, row = (Claim(*claims[name]) if name in claims else None), told.seen
        while True:
            if row is not None and known is not None:
                claim = known
            else:
                table, row = _look(connection, name, known)
                claim = _following(table, row) if known is None else known
            txn = NamedTransaction.begin(connection, **options)
            assert isinstance(txn, NamedTransaction)
            try:
                txn.context.ensure_stored("begin", told.parts)  # durable with the row of the name
                if _move(connection, row, (name, *claim, str(int(txn.id)), told.via)):
                    claims[name] = txn.claim = claim
                    txn.name = name
                    return txn
            except BaseException:
                txn.rollback()
                raise
            txn.rollback()
            row = None


def _look(connection: Connection, name: str, known: Claim | None) -> tuple[Table, _Row]:
    """Return the row of a name, with its transaction ended."""
    table = names_table(connection)
    row = table.get(name)
    if row is None:
        return table, None
    if known is not None and (row["id"], row["epoch"]) != known:
        raise ProducerFencedError(
            f"begin a transaction {name!r}: another client has taken this name over (epoch "
            f"{row['epoch']} of producer {row['id']}, this one has {known.epoch} of {known.id}). "
            "If it is this one that is to go on, connect again"
        )
    if row["txn"] is not None:
        _end(connection, name, int(row["txn"]))
    return table, row


def _end(connection: Connection, name: str, id: int) -> None:
    coordinator = connection.instance.coordinator
    try:
        local = connection.instance.local_id(id)
        if not coordinator.get(local).state.ended:
            coordinator.end(local, f"another transaction {name!r} has begun", ProducerFencedError)
    except TxnNotFoundError:  # it was forgotten, or is of the store that this one was restored from
        return


def _following(table: Table, row: _Row) -> Claim:
    if row is None or row["epoch"] >= _MOST_EPOCH:
        return Claim(producer_number(table), 0)
    return Claim(row["id"], row["epoch"] + 1)


def _move(connection: Connection, seen: _Row, row: tuple[Any, ...]) -> bool:
    """Write the row of a name, if it is as it was seen."""
    table = names_table(connection)  # somebody may have dropped the one of before
    try:
        with Transaction.begin(connection) as change:
            if change.get(table, row[0]) != seen:
                return False
            change.upsert(table, row)
    except TransactionConflictError:
        return False
    return True


# -- attempts --------------------------------------------------------------------------

ADVICE: Final = "take a plain function, or the client of txnkv.aio for an `async def`"


class Attempts:
    """The transactions of one `run`. Each has the age of the first, so that wait-die cannot starve
    it, and what one of them acknowledged is delivered to nobody else until `close`. Where others
    were first again and again, the next one has the right of way.

    Args:
        connection: to the store.
        options: as `begin_transaction` takes them.
    """

    ahead = False  # where it has the right of way, nothing blocks it

    def __init__(self, connection: Connection, options: dict[str, Any]) -> None:
        topics = connection.instance.topics
        self._connection = connection
        self._options = DEFAULTS | options
        self._hold = Hold(topics.store, topics.local)
        self._age: Timestamp | None = None
        self._lost = False
        self._thread: int | None = None
        self._contender = Contender(connection.instance.store.right_of_way)

    @property
    def blocked(self) -> bool:
        """To `wait` takes time, on a thread that others do not need."""
        return self._contender.blocked

    def failed(self, error: TxnkvError) -> None:
        """The last one failed, and there is to be another."""
        if isinstance(error, TransactionConflictError):
            self._lose()

    def _lose(self) -> None:
        self._lost = True
        self._contender.lost()

    def wait(self, thread: int | None = None, lost: bool = False) -> bool:
        """Wait for the turn to begin another.

        Args:
            thread: as `Contender.take` has it.
            lost: the last one ended with a conflict, and `failed` was not told.

        Returns:
            Whether it has the right of way.
        """
        if lost:
            self._lose()
        self._thread = thread
        self._contender.wait()
        return self._contender.take(thread)

    def begin(self, spare: int | None = None) -> Transaction:
        """The next one.

        Args:
            spare: the id to take, as `Transaction.begin` has it.
        """
        if self._lost:
            self._lost = False
            self._connection.instance.coordinator.log.show_others()
        self._contender.take(self._thread)
        if self._hold.late:  # or the attempt would find its own acks to be of another transaction
            self._hold.give_back()
        txn = begin_transaction(self._connection, self._options, age_ts=self._age, spare=spare)
        txn.context.hold = self._hold
        txn.context.on_commit = self._contender.end
        self._age = txn.age
        return txn

    def close(self) -> None:
        """The run is over. Twice is fine."""
        self._contender.end()
        self._hold.release()


def require_done(result: Any, txn: object, advice: str = ADVICE) -> None:
    """Refuse the result of a function that has done nothing yet, before its transaction commits.

    Args:
        result: of the function.
        txn: it was called with; a generator that does not have it was made of work that is done.
        advice: what to do.

    Raises:
        TypeError: it is a coroutine, or a generator that has the transaction.
    """
    if isinstance(result, CoroutineType):
        result.close()  # it is not missed, then
    elif isinstance(result, GeneratorType | AsyncGeneratorType):
        frame = result.gi_frame if isinstance(result, GeneratorType) else result.ag_frame
        given = [] if frame is None else list(frame.f_locals.values())
        if result.__name__ == "<genexpr>" or not _reaches(given, txn):
            return
    else:
        return
    raise TypeError(
        f"run calls a function that has done its work when it returns; {result.__name__} "
        f"gave a {type(result).__name__}, of which nothing has run. Nothing was committed: {advice}"
    )


_WIDE: Final = (type, ModuleType, FrameType)
"""Values from which everything is reached."""

_FEW: Final = 10_000


def _reaches(given: list[Any], txn: object) -> bool:
    """Tell whether a transaction is among values, or a few steps inside of them: arguments of a
    decorated function, an attribute of a `self`.
    """
    for _ in range(4):
        if any(value is txn for value in given):
            return True
        given = gc.get_referents(*(each for each in given if not isinstance(each, _WIDE)))[:_FEW]
    return False


def has_committed(outcome: Callable[[int], TxnState], unknown: CommitOutcomeUnknownError) -> bool:
    """Ask how the transaction has ended whose commit broke off.

    Raises:
        CommitOutcomeUnknownError: the answer is not to be had either.
    """
    try:
        return outcome(unknown.txn_id) is TxnState.COMMITTED
    except TxnkvError as unasked:
        raise unknown from unasked


def run(
    attempts: Attempts,
    outcome: Callable[[int], TxnState],
    fn: Callable[[Transaction], T],
    retries: Retries,
) -> T:
    """Call `fn(txn)` and commit, until that succeeds or `retries` says that it is enough.

    Args:
        attempts: give the transactions.
        outcome: tells how a transaction has ended whose commit broke off.
    """
    while True:
        attempts.wait(caller())
        txn, returned = attempts.begin(), False
        try:
            with txn:
                result = fn(txn)
                require_done(result, txn)
                returned = True
            return result
        except CommitOutcomeUnknownError as error:
            if not returned or not error.txn_id:
                raise  # it is of a commit of the function's own, or there is nothing to ask by
            if has_committed(outcome, error):
                return result
            pause = retries.pause(error, retriable=True)
        except TxnkvError as error:
            pause = retries.pause(error, retriable=error.retriable)
            attempts.failed(error)
        time.sleep(pause)
