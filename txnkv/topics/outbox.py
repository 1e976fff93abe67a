"""Messages and acknowledgements of a small transaction: in memory until it commits.

    add, acknowledge   kept as Arrow, by partition, and as acks by subscription
    commit             one section of batches a partition; offsets are taken, and acks applied,
                       inside the SQLite transaction that commits
    too much for that  staged: the batches are appended to the logs, open, and the acks pending

Outside of a transaction the same, but the batches belong to none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import apsw
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Section, Timestamp, TxnRow, past_timeout, payload, status_table
from txnkv.core import AckRun
from txnkv.errors import (
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    StorageFullError,
    TransactionTimedOutError,
    TxnkvError,
    UnavailableError,
)
from txnkv.topics import topic_catalog
from txnkv.topics.delivery import TransactionAcks
from txnkv.topics.log import gathered
from txnkv.topics.messages import Plain, as_arrow, cut_messages, fit_batch, now_micros
from txnkv.topics.subscription_catalog import SubscriptionInfo
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Hold, Topics
from txnkv.topics.write import AppendAttempt, Note, append, is_appended

MAX_BYTES: Final = 1 << 20
"""Bytes of a small transaction, at most."""

_MESSAGE_BYTES: Final = 16
"""Bytes that a message takes in a batch beside its content, about."""

_SMALL_BYTES: Final = 1 << 16
"""Messages of several flushes become one batch when they are less than that."""

_COUNT: Final = struct.Struct("<I")
"""Offsets taken, at byte 28 of a batch header. No call into C for it."""

_APPEND_BYTES: Final = 8 << 20
"""Bytes that are appended to a log at once, about."""


class _Lot(NamedTuple):
    """Messages of one flush."""

    messages: pa.RecordBatch | Plain
    timestamp: int
    size: int


class _Portion(NamedTuple):
    """Batches that are appended at once, and where that was tried."""

    batches: list[bytes]
    attempt: AppendAttempt


class _Partition:
    """The messages that go to one partition, in their order."""

    __slots__ = ("lots", "portions", "topic")

    def __init__(self, topic: TopicInfo) -> None:
        self.topic = topic
        self.lots: list[_Lot] = []
        self.portions: list[_Portion] = []  # encoded, to be appended first


class CommitParts(NamedTuple):
    """The functions that the commit log calls: both inside of its SQLite transaction."""

    validate: Callable[[apsw.Cursor, Timestamp], None]
    write: Callable[[apsw.Cursor, Timestamp], Sequence[Section]]
    size: int


class Outbox:
    """The messages and acknowledgements of one transaction. Not for two threads at a time.

    Args:
        topics: of the store.
        row: of the transaction.
        hold: keeps what is acknowledged while the transaction is tried again.
        transactional: False for a write outside of any transaction.
    """

    def __init__(
        self, topics: Topics, row: TxnRow, hold: Hold | None, *, transactional: bool
    ) -> None:
        self._topics = topics
        self._hold = hold
        self._row = row
        self._transactional = transactional
        self._partitions: dict[int, _Partition] = {}
        self._acks: TransactionAcks | None = None
        self._bytes = 0
        self._in_part = False  # some of it is staged, in this try or one before
        self._catalog: int | None = None

    @property
    def empty(self) -> bool:
        return not self._partitions and (self._acks is None or self._acks.empty)

    @property
    def too_large(self) -> bool:
        """More than a row of the commit log should hold."""
        return self._bytes > MAX_BYTES

    def require_live(self, topic: TopicInfo) -> None:
        """Look at the topic before messages for it are added.

        Raises:
            TopicNotFoundError: it was dropped.
        """
        version = self._topics.require_writable(topic)
        self._catalog = version if self._catalog is None else min(version, self._catalog)

    def add(self, topic: TopicInfo, number: int, messages: pa.RecordBatch | Plain) -> None:
        """Take messages for a partition of a topic that was seen to live. Memory alone.

        Args:
            topic: to which.
            number: of the partition.
            messages: as `core.encode_batch` takes them.

        Raises:
            CorruptionError: the partition is damaged, and takes no writes.
        """
        id = topic.partitions[number]
        found = self._partitions.get(id)
        if found is None:
            self._topics.refuse_held((id,))
            found = self._partitions[id] = _Partition(topic)
        size = messages.nbytes
        found.lots.append(_Lot(messages, now_micros(), size))
        self._bytes += size + _MESSAGE_BYTES * messages.num_rows

    def acknowledge(
        self,
        info: SubscriptionInfo,
        ids: Sequence[tuple[int, int]],
        *,
        cumulative: bool,
        again: bool,
    ) -> None:
        """Take acknowledgements; `again` when the same call failed before.

        Raises:
            AckConflictError: another transaction has one of them.
            OffsetOutOfRangeError: there is no such message.
        """
        if self._acks is None:
            # Kept from its making: what is refused later is given back with the transaction.
            self._acks = TransactionAcks(
                self._topics, self._row, transactional=self._transactional, hold=self._hold
            )
        self._acks.add(info, ids, cumulative=cumulative, again=again)

    def more_acks(
        self, info: SubscriptionInfo, last: tuple[int, int], before: AckRun | None
    ) -> AckRun | None:
        """The run of acks that follows the last one, if it may be one."""
        return before if self._acks is None else self._acks.more(info, last, before)

    # -- small -------------------------------------------------------------------------

    def commit_parts(self) -> CommitParts:
        """Return what the commit log needs to commit the outbox."""
        txn_id = self._row.txn_id if self._transactional else 0
        size, batches = 0, []
        for id, part in self._partitions.items():
            some = _encoded(part.topic, part.lots, txn_id, decided=self._transactional)
            data = some[0] if len(some) == 1 else b"".join(some)
            batches.append((id, data, _count(some)))
            size += len(data)

        def write(cur: apsw.Cursor, stamp: Timestamp) -> Sequence[Section]:
            if self._acks is not None:
                self._acks.write(cur, stamp)
            take = topic_catalog.take_offsets
            sections = []
            for id, data, count in batches:
                first = take(cur, id, count)
                placed = core.place(data, first, stamp)
                sections.append(Section(payload.TOPIC, id, placed, first, count))
            return sections

        return CommitParts(self._validate, write, size)

    def _validate(self, cur: apsw.Cursor, latest: Timestamp) -> None:
        row = self._row
        if past_timeout(row):
            raise TransactionTimedOutError(
                f"cannot commit: transaction {row.txn_id} timed out, after "
                f"{(row.timeout or 0) / 1e6:g} s. Begin a new transaction, with a longer timeout"
            )
        if self._partitions:
            topics = [partition.topic for partition in self._partitions.values()]
            self._topics.refuse_dropped(cur, self._catalog, topics, self._partitions)
        if self._acks is not None:
            self._acks.validate(cur, latest)

    def reopen(self) -> None:
        """Nothing was committed: the transaction is as open as before."""
        if self._acks is not None:
            self._acks.reopen()

    def ended(self, committed: bool) -> None:
        """The transaction has ended while it was small."""
        if self._acks is not None:
            self._acks.ended(committed)

    # -- large -------------------------------------------------------------------------

    def stage(self, row: TxnRow) -> None:
        """Append all to the logs and register the acks; what is done is not done again.

        Args:
            row: as it is stored; OPEN.

        Raises:
            InvalidTxnStateError: it is not open any more.
            TopicNotFoundError: a topic was dropped.
            AckConflictError: another transaction has one of the acks.
        """
        for id, kept in list(self._partitions.items()):
            batches = _encoded(kept.topic, kept.lots, row.txn_id, decided=False)
            some = gathered(batches, _APPEND_BYTES)
            kept.portions += [_Portion(each, AppendAttempt()) for each in some]
            kept.lots = []
            partition = self._topics.partition(id)
            if partition is None:
                raise topic_catalog.dropped(kept.topic)
            while kept.portions:
                try:
                    append.append(self._topics, row, partition, *kept.portions[0])
                except InvalidTxnStateError as error:
                    self._partitions.clear()  # it is refused for good, and told now
                    status_table.note_part(error, self._in_part)
                    raise
                self._in_part = True
                del kept.portions[0]
            del self._partitions[id]
        if self._acks is not None:
            self._acks.stage(row)
            self._acks = None
        self._bytes = 0


def send_alone(
    topics: Topics, topic: TopicInfo, number: int, messages: Sequence[pa.RecordBatch]
) -> None:
    """Append messages to one partition, at one instant and outside of any transaction.

    Raises:
        TopicNotFoundError: the topic was dropped; nothing was sent.
        StorageFullError, UnavailableError: the disk is full or failed; nothing was sent.
        CommitOutcomeUnknownError: and whether it was sent cannot be seen; its `ask` tells.
    """
    topics.require_writable(topic)
    lots = [_Lot(some, now_micros(), some.nbytes) for some in messages]
    partition = topics.partitions(topic)[number]
    attempt = AppendAttempt()

    def sent() -> bool:
        return is_appended(topics, partition, attempt)

    try:
        append.append_alone(topics, partition, _encoded(topic, lots, 0, decided=False), attempt)
    except (StorageFullError, UnavailableError) as error:
        try:
            if sent():
                return
        except TxnkvError:
            raise CommitOutcomeUnknownError(
                f"the disk failed while messages were appended to {partition.label} ({error}). "
                "They are there, all of them, or not",
                0,
                sent,
            ) from error
        raise


def send_open(
    topics: Topics,
    row: TxnRow,
    topic: TopicInfo,
    number: int,
    messages: pa.RecordBatch,
    note: Note,
) -> int | None:
    """Append messages of an open transaction at once, large or not.

    Args:
        topics: of the store.
        row: of the transaction, as it is stored.
        topic: to which.
        number: of the partition.
        messages: as `core.encode_batch` takes them.
        note: writes to status.db with the offsets that are taken; not where they wait beside.

    Returns:
        The offset of the first; None where they wait beside the log.

    Raises:
        InvalidTxnStateError, TopicNotFoundError, StorageFullError: nothing was appended.
    """
    partition = topics.partitions(topic)[number]
    topics.refuse_held((partition.id,))
    lot = _Lot(messages, now_micros(), messages.nbytes)
    attempt = AppendAttempt()
    batches = _encoded(topic, [lot], row.txn_id, decided=False)
    append.append(topics, row, partition, batches, attempt, note)
    return attempt.at if partition.side is None else None


def _encoded(topic: TopicInfo, lots: Sequence[_Lot], txn_id: int, *, decided: bool) -> list[bytes]:
    most = topic.options.max_message_bytes
    batches = []
    codec = topic.options.compression
    for some, timestamp, size in lots if len(lots) == 1 else _joined(lots):
        few = fit_batch(size, some.num_rows, most)
        if few and type(some) is Plain and codec is None:
            batches.append(core.message_batch(some.rows, timestamp, txn_id, decided))
            continue
        lot = as_arrow(some)
        for messages, chunk in ((lot, None),) if few else cut_messages(lot, most):
            batch = core.encode_batch(
                messages,
                timestamp=timestamp,
                txn_id=txn_id,
                decided=decided,
                codec=codec,
                chunk=chunk,
            )
            batches.append(batch)
    return batches


def _joined(lots: Sequence[_Lot]) -> list[_Lot]:
    """Small lots of the same columns that follow each other, as one."""
    groups: list[list[_Lot]] = []
    for lot in lots:
        last = groups[-1] if groups else None
        if last and _join(last[0], lot):
            last.append(lot)
        else:
            groups.append([lot])
    return [group[0] if len(group) == 1 else _one_of(group) for group in groups]


def _join(first: _Lot, lot: _Lot) -> bool:
    if first.size >= _SMALL_BYTES or lot.size >= _SMALL_BYTES:
        return False
    if isinstance(first.messages, Plain) or isinstance(lot.messages, Plain):
        return type(first.messages) is type(lot.messages)
    return bool(first.messages.schema == lot.messages.schema)


def _one_of(group: Sequence[_Lot]) -> _Lot:
    messages: pa.RecordBatch | Plain
    size = sum(lot.size for lot in group)
    if type(group[0].messages) is Plain:
        rows = [row for lot in group for row in lot.messages.rows]
        messages = Plain(rows, size, any(lot.messages.keyed for lot in group))
    else:
        messages = pa.concat_batches([lot.messages for lot in group])
    return _Lot(messages, group[0].timestamp, size)


def _count(batches: Sequence[bytes]) -> int:
    count = 0
    for batch in batches:
        count += _COUNT.unpack_from(batch, 28)[0]
    return count
