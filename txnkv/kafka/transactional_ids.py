"""Transactional ids: who may send under one, and the transaction that it has open.

A Kafka transaction is a transaction of the store: `txnkv txn list` shows it, its timeout and its
heartbeats are the store's, and its messages are appended as they come. A producer is named by a
transactional id; the id has a number and an epoch, which rises with each InitProducerId, and who
has an earlier one is refused from then on.

    InitProducerId      the epoch rises; what the predecessor has open is aborted
    AddPartitionsToTxn  the first one begins a transaction, and notes which one it is; each
                        partition takes part from then on, and gets a marker at the end
    Produce             its batches, each once: the numbers that came are noted where they take
                        their offsets
    TxnOffsetCommit     rows of `kafka_offsets`, in the transaction
    EndTxn              commit or rollback

The row of the name in `transaction_names`, of which `client.attempts` has the rules, tells the last
transaction, open or ended, so a server that is started again goes on where the one before was
stopped, and clients see a pause and nothing else:

    open                its handle is made anew; its partitions and batches are in status.db, its
                        offsets are rows that it has staged
    ended               EndTxn is answered again, where its answer was lost
    aborted by others   its timeout passed, say: its producer is fenced, as by Kafka's coordinator

The row is written under the epoch that was seen, so of two servers of one store the one with the
earlier epoch is refused; and none takes a transaction from another that is running.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import apsw
import pyarrow as pa

from txnkv.client import (
    NAMES_TABLE,
    OFFSETS_TABLE,
    Claim,
    Client,
    Table,
    begin_transaction,
    claim_name,
    names_table,
    producer_number,
)
from txnkv.coordinator import PARTITION, TxnId, TxnState, past_timeout, status_table
from txnkv.errors import (
    InvalidTxnStateError,
    ProducerFencedError,
    SchemaError,
    TransactionConflictError,
    TransactionTimedOutError,
    TxnkvError,
    TxnNotFoundError,
)
from txnkv.kafka.api_tables import Code, KafkaError
from txnkv.storage import boot_id, clock, new_lock, new_rlock
from txnkv.topics import Partition, TopicInfo, append, open_in, outbox, producers
from txnkv.transaction import ROLLED_BACK, Transaction, TxnContext

_VIA: Final = "kafka"
MOST_TIMEOUT_MILLIS: Final = 900_000

_ENDED: Final = (InvalidTxnStateError, TransactionTimedOutError, TxnNotFoundError)

OffsetKey = tuple[str, str, int]
"""Group, topic, partition."""


class Named(NamedTuple):
    """The producer as a request names it."""

    transactional_id: str
    id: int
    epoch: int


class _Producer:
    """One transactional id; what changes it holds the lock.

    Attributes:
        txn: the transaction that is open here.
        last: the transaction that its row names and that is not open here.
        committed: how the last one ended, where that was here; None before one has.
        before: the id and epoch from which it went on, when it said so.
        empty: partitions that were added and to which nothing came.
        states: batches that came, by partition; what is not there is looked up.
        offsets: those in the transaction, and the ids of their topics.
        row: of the name, as it was written here last; None where it has to be looked up.
    """

    def __init__(self, id: int, epoch: int, last: int | None) -> None:
        self.lock = new_rlock()
        self.id = id
        self.epoch = epoch
        self.timeout = 60.0
        self.txn: Transaction | None = None
        self.last = last
        self.committed: bool | None = None
        self.before: tuple[int, int] | None = None
        self.partitions: set[int] = set()
        self.empty: set[int] = set()
        self.states: dict[int, producers.ProducerState | None] = {}
        self.offsets: Mapping[OffsetKey, int | None] = {}
        self.row: Mapping[str, Any] | None = None

    def require(self, named: Named) -> None:
        """Refuse another one than the one of now.

        Raises:
            KafkaError: it is so.
        """
        if named.id != self.id:
            raise KafkaError(Code.INVALID_PRODUCER_ID_MAPPING, "the producer's id is another one")
        if named.epoch != self.epoch:
            raise fenced(named.epoch, self.epoch)


def _row(named: Named, txn: TxnId | None) -> Mapping[str, Any]:
    """The row of a name whose last transaction is this one."""
    name, id, epoch = named
    last = None if txn is None else str(int(txn))
    return {"name": name, "id": id, "epoch": epoch, "txn": last, "via": _VIA}


def gone() -> KafkaError:
    return KafkaError(
        Code.PRODUCER_FENCED, "the transaction was aborted, by its timeout or by somebody else"
    )


def nothing_open() -> KafkaError:
    return KafkaError(Code.INVALID_TXN_STATE, "no transaction is open")


def fenced(epoch: int, later: int) -> KafkaError:
    return KafkaError(
        Code.PRODUCER_FENCED, f"the producer has epoch {epoch}, a later one has epoch {later}"
    )


@contextmanager
def _as_fenced() -> Iterator[None]:
    """Tell that a name was taken over, as Kafka's clients are told of it."""
    try:
        yield
    except ProducerFencedError as error:
        raise KafkaError(Code.PRODUCER_FENCED, str(error)) from None


class TransactionalIds:
    """All transactional ids of a store, as far as this process knows.

    Args:
        client: of the store.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = new_lock()
        self._producers: dict[str, _Producer] = {}

    def close(self) -> None:
        """Leave what is open to the next server, or to the end of its keepalive time."""
        with self._lock:
            every = list(self._producers.values())
        for producer in every:
            with producer.lock:
                if producer.txn is not None:
                    producer.txn.close()

    def resume(self) -> None:
        """Go on with what servers before have left open."""
        with self._client.instance.store.status.read() as cur:
            live = {row.txn_id for row in status_table.live(cur)}
        if not live or NAMES_TABLE not in self._client.tables():
            return
        with suppress(SchemaError):  # a program's own table: whoever needs it is told
            for row in self.table.scan(where=[("via", "=", _VIA)]):
                if row["txn"] is not None and TxnId(int(row["txn"])).local in live:
                    self._find(row["name"])

    @property
    def table(self) -> Table:
        """The table of them; made at the first use."""
        return names_table(self._client)

    def new_id(self) -> int:
        """Return a number of a producer that no other has."""
        return producer_number(self.table)

    def named(self) -> list[tuple[str, int, int, int | None]]:
        """Name, number, epoch and last transaction of each producer that is known."""
        if NAMES_TABLE not in self._client.tables():
            return []
        found = []
        with suppress(SchemaError):  # a program's own table: there are none
            for row in self.table.scan():
                last = None if row["txn"] is None else TxnId(int(row["txn"])).local
                found.append((row["name"], row["id"], row["epoch"], last))
        return found

    # -- ids -----------------------------------------------------------------------------

    def begin(self, transactional_id: str, timeout_millis: int, known: Named) -> tuple[int, int]:
        """Let a new producer have a transactional id, or one go on in a new epoch.

        Args:
            transactional_id: of the producer.
            timeout_millis: of its transactions.
            known: the id and epoch that it has, -1 for none.

        Returns:
            Its id and epoch.

        Raises:
            KafkaError: it goes on from an epoch that is not the last one.
        """
        if not 0 < timeout_millis <= MOST_TIMEOUT_MILLIS:
            raise KafkaError(
                Code.INVALID_TRANSACTION_TIMEOUT, f"up to {MOST_TIMEOUT_MILLIS:,} ms, from 1 on"
            )
        producer = self._find(transactional_id)
        if producer is None:
            with self._lock:
                producer = self._producers.setdefault(transactional_id, _Producer(-1, -1, None))
        with producer.lock:
            self._refresh(transactional_id, producer)
            if known.id >= 0 and (known.id, known.epoch) == producer.before:
                return producer.id, producer.epoch  # it was answered, and the answer was lost
            if known.id >= 0 and known[1:] != (producer.id, producer.epoch):
                raise fenced(known.epoch, producer.epoch)
            self._roll_back(producer)
            gone_on = Claim(known.id, known.epoch) if known.id >= 0 else None
            with _as_fenced():
                id, epoch = claim_name(self._client, transactional_id, gone_on, _VIA)
            producer.before = (producer.id, producer.epoch) if known.id >= 0 else None
            producer.id, producer.epoch, producer.last = id, epoch, None
            producer.committed = None
            producer.row = _row(Named(transactional_id, id, epoch), None)
            producer.timeout = timeout_millis / 1000
            producer.states.clear()
            return id, epoch

    def _find(self, transactional_id: str) -> _Producer | None:
        with self._lock:
            found = self._producers.get(transactional_id)
        if found is not None:
            return found
        row = self.table.get(transactional_id)
        if row is None:
            return None
        last = None if row["txn"] is None else int(row["txn"])
        made = _Producer(row["id"], row["epoch"], last)
        with self._lock:
            found = self._producers.setdefault(transactional_id, made)
        if row["via"] == _VIA:
            with found.lock:
                self._take_over(found)
        return found

    def _get(self, named: Named) -> _Producer:
        found = self._find(named.transactional_id)
        if found is None:
            raise KafkaError(
                Code.INVALID_PRODUCER_ID_MAPPING, f"nobody is {named.transactional_id!r}"
            )
        if (found.id, found.epoch) != named[1:]:
            with found.lock:
                self._refresh(named.transactional_id, found)
        return found

    def _refresh(self, transactional_id: str, producer: _Producer) -> None:
        """See what another server of the store has made of it."""
        row = self.table.get(transactional_id)
        if row is None or (row["id"], row["epoch"]) == (producer.id, producer.epoch):
            return
        self._roll_back(producer)
        producer.id, producer.epoch = row["id"], row["epoch"]
        producer.last = None if row["txn"] is None else int(row["txn"])
        producer.committed = producer.before = producer.row = None
        producer.states.clear()
        if row["via"] == _VIA:
            self._take_over(producer)

    # -- transactions ----------------------------------------------------------------------

    def add(self, named: Named, partitions: Sequence[Partition]) -> None:
        """Begin a transaction, unless one is open, and let it send to partitions.

        Raises:
            KafkaError: the producer is fenced, or its transaction is gone.
        """
        producer = self._get(named)
        with producer.lock:
            producer.require(named)
            self._settle(producer)
            fresh = [each for each in partitions if each.id not in producer.partitions]
            begins = producer.txn is None
            if begins:
                name = named.transactional_id
                options = {
                    "name": name,
                    "claims": {name: Claim(*named[1:])},
                    "via": _VIA,
                    "seen": producer.row,
                    "parts": {PARTITION: [each.id for each in fresh]},
                }
                with _as_fenced():
                    txn = begin_transaction(self._client, options, timeout=producer.timeout)
                txn.context.share("begin")  # the next server goes on with it
                producer.txn, producer.last, producer.committed = txn, None, None
                producer.row = _row(named, txn.id)
            else:
                with self._open(producer) as txn:
                    append.take_part(self._client.instance.topics, txn.context.row, fresh)
            ids = {each.id for each in fresh}
            producer.partitions |= ids
            producer.empty |= ids

    @contextmanager
    def _open(self, producer: _Producer) -> Iterator[Transaction]:
        """The open transaction, for one step in it.

        Raises:
            KafkaError: there is none, or somebody has aborted it.
        """
        self._settle(producer)
        txn = producer.txn
        if txn is None:
            raise nothing_open()
        try:
            yield txn
        except _ENDED:
            txn.close()
            self._ended(producer, committed=None)
            producer.last = int(txn.id)
            self._settle(producer)
            raise

    def _settle(self, producer: _Producer) -> None:
        """See how the transaction ended that the row names, or go on with it.

        Raises:
            KafkaError: somebody has aborted it.
        """
        self._take_over(producer)
        if producer.last is None:
            return
        try:
            self._client.outcome(producer.last)
            row = self._client.instance.coordinator.get(TxnId(producer.last).local)
        except (TxnNotFoundError, InvalidTxnStateError):
            raise gone() from None
        if row.timeout is not None:
            producer.timeout = row.timeout / 1e6
        if row.state in (TxnState.COMMITTED, TxnState.FINALIZE_IN_PROGRESS):
            self._ended(producer, committed=True)
        elif row.state is TxnState.ABORTED and row.reason == ROLLED_BACK:
            self._ended(producer, committed=False)
        else:
            raise gone()

    def send(
        self, named: Named, topic: TopicInfo, number: int, rows: pa.RecordBatch, sequence: int
    ) -> int:
        """Append messages of the open transaction; return the first's offset, -1 beside the log.

        Raises:
            KafkaError: the producer is fenced, or has no such transaction open.
            OutOfOrderSequenceError: messages before them are missing.
        """
        producer = self._get(named)
        with producer.lock:
            producer.require(named)
            with self._open(producer) as txn:
                return self._send(producer, txn, topic, number, rows, sequence)

    def _send(
        self,
        producer: _Producer,
        txn: Transaction,
        topic: TopicInfo,
        number: int,
        rows: pa.RecordBatch,
        sequence: int,
    ) -> int:
        engine = self._client.instance.topics
        id = topic.partitions[number]
        if id not in producer.partitions:
            raise KafkaError(Code.INVALID_TXN_STATE, "the partition is in no open transaction")
        key = -1 - producer.id  # no producer of the store has one below 0
        if id not in producer.states:
            partition = engine.partitions(topic)[number]
            producer.states[id] = append.sent_before(engine, partition, key)
        last = producers.last_of(sequence, rows.num_rows)
        state = producer.states[id]
        there = producers.duplicate_of(state, producer.epoch, sequence, last)
        if there is not None:
            return there.first_offset

        def after(first: int) -> producers.ProducerState:
            upto = first + rows.num_rows - 1
            batch = producers.SentBatch(sequence, last, first, upto, clock.now_micros())
            return producers.appended(state, producer.epoch, batch)

        def note(cur: apsw.Cursor, first: int) -> None:
            producers.save(cur, key, id, after(first))

        del producer.states[id]  # after an error it is looked up whether the batch is there
        at = outbox.send_open(engine, txn.context.row, topic, number, rows, note)
        first = -1 if at is None else at
        producer.states[id] = after(first)
        producer.empty.discard(id)
        return first

    def commit_offsets(
        self, named: Named, table: Table, rows: Mapping[OffsetKey, Mapping[str, Any]]
    ) -> None:
        """Write rows of `kafka_offsets` in the open transaction.

        Raises:
            KafkaError: the producer is fenced, or has no transaction open.
        """
        producer = self._get(named)
        with producer.lock:
            producer.require(named)
            with self._open(producer) as txn:
                for row in rows.values():
                    txn.upsert(table, row)
                txn.flush()
            producer.offsets = {**producer.offsets, **self._with_topics(rows)}

    def pending(self) -> frozenset[OffsetKey]:
        """Return the offsets that open transactions have. Who reads offsets asks before."""
        with self._lock:
            every = list(self._producers.values())
        found: frozenset[OffsetKey] = frozenset()
        for producer in every:
            offsets, txn = producer.offsets, producer.txn
            if offsets and txn is not None and not self._has_ended(txn):
                found |= frozenset(offsets)
        return found

    def _has_ended(self, txn: Transaction) -> bool:
        """Tell whether a transaction has ended, perhaps by its timeout, its producer being gone."""
        try:
            return self._client.instance.coordinator.get(txn.id.local).state.ended
        except TxnNotFoundError:
            return True

    def end(self, named: Named, *, commit: bool) -> None:
        """Commit or roll back; again is fine.

        Raises:
            KafkaError: the producer is fenced; or the transaction ended the other way, or is gone.
            UnavailableError, CommitOutcomeUnknownError: it is not known; ask again.
        """
        producer = self._get(named)
        with producer.lock:
            producer.require(named)
            self._settle(producer)
            if producer.txn is not None:
                # Where somebody ended it meanwhile it is known now how.
                with suppress(*_ENDED), self._open(producer) as txn:
                    self._end(producer, txn, commit=commit)
            if producer.committed is not commit:
                raise nothing_open()

    def _end(self, producer: _Producer, txn: Transaction, *, commit: bool) -> None:
        if not commit:
            row = self._client.instance.coordinator.get(txn.context.row.txn_id)
            if row.state is not TxnState.OPEN:
                raise InvalidTxnStateError("somebody has aborted it")
            self._roll_back(producer)
            return
        now = self._with_topics(producer.offsets)
        try:
            for key, topic in producer.offsets.items():
                if topic != now[key]:  # it was dropped, and another may have its name
                    txn.delete_ignore(OFFSETS_TABLE, key)
            txn.commit()
        except TransactionConflictError as error:
            self._roll_back(producer)
            raise KafkaError(Code.INVALID_PRODUCER_ID_MAPPING, str(error)) from None
        self._ended(producer, committed=True)

    # -- the next server -------------------------------------------------------------------

    def _take_over(self, producer: _Producer) -> None:
        """Go on with a transaction of a server that is gone.

        Not after the machine was started again: which batches came is known in status.db, and a
        log may have one that did not reach that. Nor with messages beside a log, which have no
        numbers there.
        """
        instance = self._client.instance
        if producer.txn is not None or producer.last is None:
            return
        try:
            row = instance.coordinator.get(TxnId(producer.last).local)
        except (TxnNotFoundError, InvalidTxnStateError):
            return
        runtime = instance.store.runtime
        owner = row.owner_slot, row.owner_start
        served = owner != runtime.owner and runtime.slot_alive(*owner)
        if row.state is not TxnState.OPEN or past_timeout(row) or served or row.boot != boot_id():
            return
        with instance.store.status.read() as cur:
            ids = status_table.participants(cur, row.txn_id).get(PARTITION, [])
        found = [instance.topics.partition(id) for id in ids]
        if any(each is None or each.side is not None for each in found):
            return
        context = TxnContext(instance, row, stored=True)
        txn = Transaction(self._client, context, joined=False, keepalive=True)
        producer.offsets = self._with_topics(self._offsets_of(txn))
        if row.timeout is not None:
            producer.timeout = row.timeout / 1e6
        producer.txn, producer.last, producer.committed = txn, None, None
        producer.partitions = set(ids)
        producer.empty = {
            each.id for each in found if each is not None and row.txn_id not in open_in(each)
        }

    def _offsets_of(self, txn: Transaction) -> list[OffsetKey]:
        """The offsets that a transaction has: rows that were not so at its begin."""
        if OFFSETS_TABLE not in self._client.tables():
            return []
        columns = ["group", "topic", "partition", "committed"]
        table = self._client.table(OFFSETS_TABLE)
        with self._client.snapshot(txn.snapshot) as begin:
            before = {tuple(row.values()) for row in begin.scan(table, columns)}
        now = {tuple(row.values()) for row in txn.scan(table, columns)}
        return [(group, topic, number) for group, topic, number, _ in now - before]

    def _with_topics(self, keys: Iterable[OffsetKey]) -> dict[OffsetKey, int | None]:
        """Ids of the topics of offsets, as of now; None for one that is not there."""
        topics = [(key, self._client.instance.topics.find(key[1])) for key in keys]
        return {key: None if topic is None else topic.id for key, topic in topics}

    def _roll_back(self, producer: _Producer) -> None:
        if producer.txn is not None:
            with suppress(InvalidTxnStateError, TxnNotFoundError):
                producer.txn.rollback()
            self._ended(producer, committed=False)

    def _ended(self, producer: _Producer, *, committed: bool | None) -> None:
        txn, producer.txn, producer.last = producer.txn, None, None
        producer.committed = committed
        producer.partitions.clear()
        empty, producer.empty = producer.empty, set()
        if txn is not None and committed is not None:
            self._mark(txn, empty, commit=committed)
        producer.offsets = {}

    def _mark(self, txn: Transaction, ids: Iterable[int], *, commit: bool) -> None:
        """Give logs to which nothing came the marker that a broker gives them, too."""
        topics = self._client.instance.topics
        for id in sorted(ids):
            partition = topics.partition(id)
            if partition is not None and partition.side is None:
                with suppress(TxnkvError):  # the transaction has ended, and nobody waits for it
                    append.mark_end(topics, txn.context.row.txn_id, partition, commit=commit)
