"""Transactional ids: who may send under one, and the transaction that it has open.

A Kafka transaction is a transaction of the store: `txnkv txn list` shows it, its timeout and its
heartbeats are the store's, and its messages are appended as they come. A producer is named by a
transactional id; the id has a number and an epoch, which rises with each InitProducerId, and who
has an earlier one is refused from then on.

    InitProducerId      the epoch rises; what the predecessor has open is aborted
    AddPartitionsToTxn  the first one begins a transaction, and notes which one it is
    Produce             its batches, each once: the numbers that came are remembered
    TxnOffsetCommit     rows of `kafka_offsets`, in the transaction
    EndTxn              commit or rollback

The row of `kafka_producers` names the transaction from its begin to the next one, or until its
producer has aborted it. So a server that was started again can tell how it ended: a commit whose
answer was lost is answered again, and whoever goes on in a transaction that is gone is told to
abort it. The row is written under the epoch that was seen, so of two servers of one store the one
with the earlier epoch is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv.client import Client, Table
from txnkv.coordinator import TxnState
from txnkv.errors import (
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    TransactionConflictError,
    TxnNotFoundError,
    UnavailableError,
)
from txnkv.kafka.answer_codes import Code, KafkaError
from txnkv.storage import new_lock, new_rlock
from txnkv.tables import Schema
from txnkv.topics import Partition, TopicInfo, outbox, producers
from txnkv.transaction import Transaction

PRODUCERS_TABLE: Final = "kafka_producers"
_COLUMNS: Final = Schema(
    {"transactional_id": "string", "producer_id": "int64", "epoch": "int32", "txn": "string?"},
    primary_key=["transactional_id"],
)
_MOST_EPOCH: Final = 32_766
MOST_TIMEOUT_MILLIS: Final = 900_000

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
        lost: the transaction that its row names, of another server or of one before.
        committed: how the last one ended; None before one has.
        before: the id and epoch from which it went on, when it said so.
    """

    def __init__(self, id: int, epoch: int, lost: int | None) -> None:
        self.lock = new_rlock()
        self.id = id
        self.epoch = epoch
        self.timeout = 60.0
        self.txn: Transaction | None = None
        self.lost = lost
        self.committed: bool | None = None
        self.before: tuple[int, int] | None = None
        self.partitions: set[int] = set()
        self.states: dict[int, producers.ProducerState] = {}
        self.offsets: set[OffsetKey] = set()

    def require(self, named: Named) -> None:
        """Refuse another one than the one of now.

        Raises:
            KafkaError: it is so.
        """
        if named.id != self.id:
            raise KafkaError(Code.INVALID_PRODUCER_ID_MAPPING, "the producer's id is another one")
        if named.epoch != self.epoch:
            raise fenced(named.epoch, self.epoch)

    def require_open(self) -> Transaction:
        """Return the open transaction.

        Raises:
            KafkaError: there is none, or it is gone with the server that had it.
        """
        if self.txn is not None:
            return self.txn
        if self.lost is not None:
            raise gone()
        raise KafkaError(Code.INVALID_TXN_STATE, "no transaction is open")


def gone() -> KafkaError:
    return KafkaError(
        Code.INVALID_PRODUCER_ID_MAPPING,
        "the transaction is gone with the server that had it: abort it, and begin anew",
    )


def fenced(epoch: int, later: int) -> KafkaError:
    return KafkaError(
        Code.PRODUCER_FENCED, f"the producer has epoch {epoch}, a later one has epoch {later}"
    )


class TransactionalIds:
    """All transactional ids of a store, as far as this process knows.

    Args:
        client: of the store.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = new_lock()
        self._making = new_lock()
        self._table: Table | None = None
        self._producers: dict[str, _Producer] = {}
        self._pending: Counter[OffsetKey] = Counter()

    def close(self) -> None:
        """Roll back what is open."""
        with self._lock:
            every = list(self._producers.values())
        for producer in every:
            with producer.lock:
                self._roll_back(producer)

    @property
    def table(self) -> Table:
        """The table of them; made at the first use."""
        with self._making:
            if self._table is None:
                self._table = self._client.create_table(PRODUCERS_TABLE, _COLUMNS, exists_ok=True)
            return self._table

    def new_id(self) -> int:
        """Return a number of a producer that no other has."""
        return self.table.next_id()

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
            if known.id >= 0:
                producer.require(known)
            self._roll_back(producer)
            if producer.lost is not None:
                self._abort_lost(producer.lost)
            id, epoch = producer.id, producer.epoch + 1
            if id < 0 or epoch > _MOST_EPOCH:
                id, epoch = self.new_id(), 0
            self._note(transactional_id, producer, id, epoch, None)
            producer.before = (producer.id, producer.epoch) if known.id >= 0 else None
            producer.id, producer.epoch, producer.lost = id, epoch, None
            producer.committed = None
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
        lost = None if row["txn"] is None else int(row["txn"])
        made = _Producer(row["producer_id"], row["epoch"], lost)
        with self._lock:
            return self._producers.setdefault(transactional_id, made)

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
        if row is None or (row["producer_id"], row["epoch"]) == (producer.id, producer.epoch):
            return
        self._roll_back(producer)
        producer.id, producer.epoch = row["producer_id"], row["epoch"]
        producer.lost = None if row["txn"] is None else int(row["txn"])
        producer.committed = producer.before = None
        producer.states.clear()

    def _note(
        self, transactional_id: str, producer: _Producer, id: int, epoch: int, txn: int | None
    ) -> None:
        """Write the row, if it is as it was seen.

        Raises:
            KafkaError: another server has given out a later epoch.
        """

        def write(txn_of: Transaction) -> None:
            row = txn_of.get(self.table, transactional_id)
            if row is not None and (row["producer_id"], row["epoch"]) != (
                producer.id,
                producer.epoch,
            ):
                raise fenced(producer.epoch, row["epoch"])
            noted = None if txn is None else str(txn)
            txn_of.upsert(self.table, (transactional_id, id, epoch, noted))

        self._client.run(write)

    def _abort_lost(self, txn_id: int) -> None:
        with suppress(TxnNotFoundError, InvalidTxnStateError):
            self._client.abort_transaction(txn_id)

    # -- transactions ----------------------------------------------------------------------

    def add(self, named: Named, partitions: Sequence[Partition]) -> None:
        """Begin a transaction, unless one is open, and let it send to partitions.

        Raises:
            KafkaError: the producer is fenced, or its transaction is gone.
        """
        producer = self._get(named)
        with producer.lock:
            producer.require(named)
            if producer.lost is not None:
                self._end_lost(producer, commit=True)  # what was committed was its producer's wish
            if producer.txn is None:
                txn = self._client.new_transaction(timeout=producer.timeout)
                try:
                    txn.context.ensure_stored("begin")
                    self._note(named.transactional_id, producer, *named[1:], int(txn.id))
                except BaseException:
                    txn.rollback()
                    raise
                producer.txn = txn
                producer.committed = None
            producer.partitions.update(each.id for each in partitions)

    def send(
        self, named: Named, topic: TopicInfo, number: int, rows: pa.RecordBatch, sequence: int
    ) -> int:
        """Append messages of the open transaction; return the first's offset, -1 beside the log.

        Raises:
            KafkaError: the producer is fenced, or has no such transaction open.
            OutOfOrderSequenceError: messages before them are missing.
        """
        producer = self._get(named)
        id = topic.partitions[number]
        with producer.lock:
            producer.require(named)
            txn = producer.require_open()
            if id not in producer.partitions:
                raise KafkaError(Code.INVALID_TXN_STATE, "the partition is in no open transaction")
            last = producers.last_of(sequence, rows.num_rows)
            state = producer.states.get(id)
            there = producers.duplicate_of(state, named.epoch, sequence, last)
            if there is not None:
                return there.first_offset
            engine = self._client.instance.topics
            at = outbox.send_open(engine, txn.context.row, topic, number, rows)
            first = -1 if at is None else at
            batch = producers.SentBatch(sequence, last, first, first + rows.num_rows - 1, 0)
            producer.states[id] = producers.appended(state, named.epoch, batch)
            return first

    def commit_offsets(
        self, named: Named, table: Table, rows: Sequence[tuple[OffsetKey, tuple[Any, ...]]]
    ) -> None:
        """Write rows of `kafka_offsets` in the open transaction.

        Raises:
            KafkaError: the producer is fenced, or has no transaction open.
        """
        producer = self._get(named)
        with producer.lock:
            producer.require(named)
            txn = producer.require_open()
            for key, rest in rows:
                txn.upsert(table, (*key, *rest))
            txn.flush()
            with self._lock:
                for key, _ in rows:
                    if key not in producer.offsets:
                        producer.offsets.add(key)
                        self._pending[key] += 1

    def is_pending(self, key: OffsetKey) -> bool:
        """Tell whether an open transaction has an offset of a group."""
        return self._pending[key] > 0

    def end(self, named: Named, *, commit: bool) -> None:
        """Commit or roll back; again is fine.

        Raises:
            KafkaError: the producer is fenced; or the transaction ended the other way, or is gone.
            UnavailableError, CommitOutcomeUnknownError: it is not known; ask again.
        """
        producer = self._get(named)
        with producer.lock:
            producer.require(named)
            if producer.lost is not None:
                self._end_lost(producer, commit=commit)
                if not commit:
                    self._note(named.transactional_id, producer, *named[1:], None)
                return
            if producer.txn is None:
                if producer.committed is not commit:
                    raise KafkaError(Code.INVALID_TXN_STATE, "no transaction is open")
                return
            if not commit:
                self._roll_back(producer)
                self._note(named.transactional_id, producer, *named[1:], None)
                return
            try:
                producer.txn.commit()
            except (UnavailableError, CommitOutcomeUnknownError):
                raise
            except (TransactionConflictError, InvalidTxnStateError, TxnNotFoundError) as error:
                self._roll_back(producer)
                raise KafkaError(Code.INVALID_PRODUCER_ID_MAPPING, str(error)) from None
            self._ended(producer, committed=True)

    def _end_lost(self, producer: _Producer, *, commit: bool) -> None:
        """See how the transaction ended that its row names; abort it where that is wanted.

        Raises:
            KafkaError: it is to be committed, and is not.
        """
        assert producer.lost is not None
        if not commit:
            self._abort_lost(producer.lost)
            self._ended(producer, committed=False)
            return
        try:
            state = self._client.outcome(producer.lost)
        except (TxnNotFoundError, InvalidTxnStateError):
            state = TxnState.ABORTED
        if state not in (TxnState.COMMITTED, TxnState.FINALIZE_IN_PROGRESS):
            raise gone()
        self._ended(producer, committed=True)

    def _roll_back(self, producer: _Producer) -> None:
        if producer.txn is not None:
            with suppress(InvalidTxnStateError, TxnNotFoundError):
                producer.txn.rollback()
            self._ended(producer, committed=False)

    def _ended(self, producer: _Producer, *, committed: bool) -> None:
        producer.txn = producer.lost = None
        producer.committed = committed
        producer.partitions.clear()
        with self._lock:
            for key in producer.offsets:
                self._pending[key] -= 1
                if self._pending[key] <= 0:
                    del self._pending[key]
        producer.offsets.clear()
