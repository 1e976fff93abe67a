"""The begin of transactions: of one `client.run`, one after the other until one commits; and of
those that have a name.

**Names.** At most one transaction of a name is open: who begins another one ends it. The row of a
name in the table `transaction_names` says whose it is, and has the id of the last transaction that
was stored, open or ended; or an id that no transaction has, of the process that begins them:

    client A   begin "billing"    no row yet: A's, epoch 0         row (1, 0, 10)
               txn 11 commits     small: refused if the row was changed since it began
               txn 12 is stored   its id is put into the row       row (1, 0, 12)
    client B   begin "billing"    not B's: the epoch rises;        row (1, 1, 13)
                                  12 is aborted before that
    client A   txn 12 commits     ProducerFencedError
               begin "billing"    its epoch is 0, and 1 is there: ProducerFencedError, for good

What the one before has committed is visible before the snapshot of the next one is taken. If it is
open it can commit no more by then: a stored one is ended, a small one is refused by the row, and no
begin waits for it. The row is moved from what was seen to what is to be, in a transaction of its
own, and has no value twice: of two who begin at once, one is the later one. Where the one before
was begun in this process and has ended (`Name`), the row stays, and nothing is written. A
transaction that is stored and killed before the row has its id has done nothing, and ends with its
keepalive time.

This is the transactional id of Kafka, whose clients have the same names: number and epoch of a row
are those of the producer, and `via` says for whose clients it was claimed.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
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
from txnkv.storage import (
    BusyError,
    Contender,
    caller,
    is_calm,
    new_rlock,
    shielded,
    shielded_unless,
)
from txnkv.tables import Partitioning, ReadView, RowWatch, Schema, TableInfo, lookup
from txnkv.topics import Hold
from txnkv.transaction import (
    DEFAULTS,
    Connection,
    Fence,
    Instance,
    Retries,
    Transaction,
    TxnContext,
    name_taken,
)

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

_KEPT_NAMES: Final = 10_000

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
        if _move(connection, row, _row(connection, name, claim, None, via)):
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
            claim is known and the last transaction has ended; and `parts`, participants by kind of
            one that is stored at once.
        **more: of `Transaction.begin`.

    Raises:
        ProducerFencedError: another one has taken the name over since it was claimed.
        ValueError: an option makes no sense.
    """
    rest = dict(options) | more
    name, claims = rest.pop("name", None), rest.pop("claims", connection.claims)
    told = _Begin(rest.pop("via", ""), rest.pop("seen", None), rest.pop("parts", None))
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
    parts: PartIds | None


class Name:
    """A name as it was last used in this process.

    Attributes:
        lock: held by who begins under it.
        row: of the name, where it has the id of no transaction; None: it has to be looked up.
        last: the transaction that was begun last.
        begun: how often one was.
    """

    begun = 0
    row: _Row = None
    last: Callable[[], TxnContext | None] | None = None
    _found: tuple[TableInfo, RowWatch] | None = None

    @property
    def claim(self) -> Claim | None:
        """The claim in the row."""
        return None if self.row is None else Claim(self.row["id"], self.row["epoch"])

    def __init__(self) -> None:
        self.lock = new_rlock()  # a thread that commits may call what a program has to be told

    def find(self, connection: Connection, name: str) -> tuple[TableInfo, RowWatch]:
        """Return the table of names, and the row of this one in it."""
        if self._found is None or self._found[1].needs_cursor:
            table = names_table(connection).info
            self._found = table, RowWatch(connection.instance.engine, table, name)
        return self._found

    @property
    def has_open(self) -> bool:
        """The last one has not ended, as far as is known here."""
        last = None if self.last is None else self.last()
        return last is not None and not last.local.ended

    def abort_last(self) -> None:
        """End the last one, if nobody is at it: the row refuses it, and who is at it may wait for
        the caller.
        """
        last = None if self.last is None else self.last()
        if last is not None and last.lock.acquire(False):
            try:
                last.lose_name(surely=True)
            finally:
                last.lock.release()


def _follows(
    connection: Connection,
    name: str,
    claims: MutableMapping[str, Claim],
    told: _Begin,
    _options: Mapping[str, Any],
) -> bool:
    """Tell whether it begins without any I/O: the one before was begun here, and has ended."""
    at: Name | None = connection.instance.names.get(name)
    if at is None or at.row is None or told.parts is not None or not at.lock.acquire(False):
        return False
    at.lock.release()
    return claims.get(name) == at.claim and not at.has_open


@shielded_unless(_follows)
def _begin_named(
    connection: Connection,
    name: str,
    claims: MutableMapping[str, Claim],
    told: _Begin,
    options: Mapping[str, Any],
) -> NamedTransaction:
    names = connection.instance.names
    if len(names) > _KEPT_NAMES:
        names.clear()  # who begins under one of them looks at its row
    at = names.get(name) or names.setdefault(name, Name())
    if is_calm() and not _follows(connection, name, claims, told, options):
        raise BusyError("it is more than is done in no time")
    with at.lock:
        known, row = (Claim(*claims[name]) if name in claims else None), told.seen or at.row
        if at.has_open and told.parts is None:
            row = None
        while True:
            if row is not None and known == (row["id"], row["epoch"]):
                claim = Claim(*known)
            elif is_calm():
                raise BusyError("it is more than is done in no time")
            else:
                row, claim = _hold(connection, name, known, told)
            at.abort_last()
            at.begun = number = at.begun + 1
            txn = NamedTransaction.begin(connection, **options)
            assert isinstance(txn, NamedTransaction)
            txn.name, txn.claim = name, claim
            try:
                at.row, at.last = row, weakref.ref(txn.context)
                # A finalizer of the program's may have begun another one in between.
                if at.begun == number and _fence(connection, at, txn, told):
                    claims[name] = claim
                    return txn
            except BaseException:
                txn.rollback()
                raise
            txn.rollback()
            row = None


def _hold(
    connection: Connection, name: str, known: Claim | None, told: _Begin
) -> tuple[_Row, Claim]:
    """Have the row of a name changed, so that who began under it before is refused.

    Returns:
        The row, and the claim of who begins next. Of one that is stored at once it is as it was.
    """
    ids = connection.instance.coordinator.ids
    while True:
        table, row = _look(connection, name, known)
        claim = _following(table, row) if known is None else known
        if told.parts is not None:
            return row, claim
        ids.ended(none := ids.begin())
        held = _row(connection, name, claim, none, told.via)
        if _move(connection, row, held):
            return held, claim


def _row(
    connection: Connection, name: str, claim: Claim, local: int | None, via: str
) -> Mapping[str, Any]:
    txn = None if local is None else str(int(connection.instance.coordinator.txn_id(local)))
    return {"name": name, "id": claim.id, "epoch": claim.epoch, "txn": txn, "via": via}


def _fence(connection: Connection, at: Name, txn: NamedTransaction, told: _Begin) -> bool:
    """Have a transaction end where its name is taken. False: it is by now."""
    name, claim, row = txn.name, txn.claim, at.row
    assert claim is not None

    def forget() -> None:
        at.row = None

    def take(local: int) -> bool:
        forget()
        mine = _row(connection, name, claim, local, told.via)
        return _move(connection, row, mine) or names_table(connection).get(name) == mine

    context = txn.context
    table, watch = at.find(connection, name)
    context.fence = Fence(context.instance.coordinator, name, watch, context.snapshot, take, forget)
    if told.parts is None:
        engine, view = connection.instance.engine, ReadView(context.snapshot)
        return lookup.get(engine, engine.row_writer(table), view, name) == row
    try:
        context.ensure_stored("begin", told.parts)
    except ProducerFencedError:
        return False
    return True


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
        _end(connection.instance, name, int(row["txn"]))
    return table, row


def _end(instance: Instance, name: str, id: int) -> None:
    coordinator = instance.coordinator
    try:
        local = instance.local_id(id)
        if not coordinator.get(local).state.ended:
            coordinator.end(local, str(name_taken(name)), ProducerFencedError)
    except TxnNotFoundError:  # it was forgotten, or is of the store that this one was restored from
        return


def _following(table: Table, row: _Row) -> Claim:
    if row is None or row["epoch"] >= _MOST_EPOCH:
        return Claim(producer_number(table), 0)
    return Claim(row["id"], row["epoch"] + 1)


def _move(connection: Connection, seen: _Row, row: Mapping[str, Any]) -> bool:
    """Write the row of a name, if it is as it was seen."""
    table = names_table(connection)  # somebody may have dropped the one of before
    try:
        with Transaction.begin(connection) as change:
            if change.get(table, row["name"]) != seen:
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

    def failed(self, error: Exception) -> None:
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
        returned = False
        try:
            with attempts.begin() as txn:
                result = fn(txn)
                require_done(result, txn)
                returned = True
            return result
        except CommitOutcomeUnknownError as error:
            if not returned or not error.txn_id:
                raise  # it is of a commit of the function's own, or there is nothing to ask by
            if has_committed(outcome, error):
                return result
            pause = retries.pause(error)
        except Exception as error:
            if getattr(error, "retriable", None) is not True:
                raise
            pause = retries.pause(error)
            attempts.failed(error)
        time.sleep(pause)
