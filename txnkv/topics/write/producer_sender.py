"""Sending the messages of an idempotent producer: each comes once, whatever happens on the way.

All that is sent at one time is one small commit: batches of each partition, and the producer's
new states, in one SQLite transaction (`producers`). A commit that breaks off is committed or not,
and the sender cannot know; so it sends the very same again, under the same sequence numbers:

    sent 5..9, committed, answer lost      sent again: a duplicate, answered with its first offsets
    sent 5..9, not committed               sent again: appended

Sequence numbers move on only when an answer is there. What fails for good, a full disk for one,
leaves no gap: the next messages take its numbers. Only after a commit that stayed unsure until
patience ran out are they not known; the producer then goes on in a new epoch, at 0.

Many bytes of a producer that numbers its messages itself go straight into the log, at half of the
writing. Their numbers are durable in status.db before the log has them, so an end in between leaves
numbers without messages; who does not know that it did not end so looks first (`forget_lost`), and
before it answers that something is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import apsw
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Section, SmallCommit, Timestamp, payload
from txnkv.errors import CommitOutcomeUnknownError, OutOfOrderSequenceError, TxnkvError
from txnkv.storage import back_off, clock
from txnkv.topics import topic_catalog
from txnkv.topics.messages import cut_messages, now_micros
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Topics
from txnkv.topics.write import append, producers
from txnkv.topics.write.producers import Sending, SentBatch

PATIENCE: Final = 120.0
"""Seconds for which a commit is tried again."""

_ALONE_BYTES: Final = 1 << 19
"""So many bytes are no row of the commit log, where they have sequence numbers of their own."""

_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.5


@dataclass(frozen=True)
class Delivered:
    """Messages that are in a partition now.

    Attributes:
        number: of the partition.
        base: the first offset that was taken.
        places: how far behind `base` each message stands; None: one offset for each.
    """

    number: int
    base: int
    places: Sequence[int] | None

    def offset(self, index: int) -> int:
        """Return the offset of a message, by its index."""
        return self.base + (index if self.places is None else self.places[index])


@dataclass
class _Share:
    """The messages of one partition, encoded."""

    number: int
    partition_id: int
    batches: list[bytes]
    count: int
    messages: int
    places: Sequence[int] | None
    sending: Sending
    base: int = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.batches))

    def at(self, base: int, now: int) -> SentBatch:
        """Take offsets from `base` on."""
        self.base = base
        _, first, last = self.sending
        return SentBatch(first, last, base, base + self.count - 1, now)


class _AllThereError(TxnkvError):
    """All of it was appended before: nothing is to be committed."""


class _DoubtedError(TxnkvError):
    """Some of it seems to be there, by its numbers: nothing was committed."""


class Sender:
    """One idempotent producer. For one thread at a time.

    Attributes:
        producer: as its batches name it.
        patience: seconds for which a commit is tried again.
        sent: messages of this one and of those who had the name before, all of them durable.

    Args:
        topics: of the store.
        topic: to which it sends.
        name: a later producer of this name and topic fences this one; None: nobody does.
        patience: seconds for which a commit is tried again.
        epoch: of a producer that numbers its messages itself; `deliver` is told the numbers.
        known: id and epoch of the named producer that goes on; None: a new one.

    Raises:
        ProducerFencedError: a later epoch was seen than this one, or another than was known.
    """

    def __init__(
        self,
        topics: Topics,
        topic: TopicInfo,
        name: str | None,
        patience: float = PATIENCE,
        epoch: int | None = None,
        known: Sequence[int] | None = None,
    ) -> None:
        self._topics = topics
        self._topic = topic
        self.patience = patience
        self._next: dict[int, int] = {}
        self._unsure = False
        self._numbered = epoch is not None
        self._sure: set[int] = set()  # partitions in which no numbers are without messages
        version = topics.require_writable(topic)
        with topics.store.status.write() as cur:
            topics.refuse_dropped(cur, version, [topic])
            now = clock.now_micros()
            if name is not None and epoch is not None:
                self.producer = producers.adopt(cur, topic.id, name, epoch, now)
            elif name is not None and known is not None:
                self.producer = producers.resume(cur, topic.id, name, known, now)
            else:
                self.producer = producers.register(cur, topic.id, name, now)
        self.sent = self.producer.sent

    @property
    def partitions(self) -> int:
        """The number of partitions of the topic, as it is now, or was when it was dropped."""
        with suppress(TxnkvError):
            self._topic = self._topics.current(self._topic)
        return len(self._topic.partitions)

    def look(self) -> int:
        """The same: a sender that is elsewhere asks for it."""
        return self.partitions

    def deliver(
        self,
        messages: Sequence[tuple[int, pa.RecordBatch]],
        sequences: Sequence[int] | None = None,
    ) -> list[Delivered]:
        """Append messages, durably; all of them or none.

        Args:
            messages: by number of the partition, as `core.encode_batch` takes them; those of one
                partition in their order.
            sequences: the number of the first message of each, where the producer gives them.

        Returns:
            Where they are, in the order of the argument.

        Raises:
            ProducerFencedError: a later producer of the name took over. Nothing was appended.
            OutOfOrderSequenceError: what this producer sent before is not in the log any more.
                Nothing was appended; it may go on.
            TopicNotFoundError: the topic was dropped.
            StorageFullError: no room. Nothing was appended.
            UnavailableError: the store failed all the time. Nothing was appended.
            CommitOutcomeUnknownError: the disk failed at the commit point, and all the time
                since: they are there, or will never be.
        """
        self._topic = self._topics.current(self._topic)
        if sequences is None and self._unsure:
            self._renew()
        upcoming = self._next.copy()  # which moves on when they are there
        shares = []
        firsts: Sequence[int | None] = sequences or [None] * len(messages)
        for (number, batch), first in zip(messages, firsts, strict=True):
            id = self._topic.partitions[number]
            share = self._share(number, batch, upcoming.get(id, 0) if first is None else first)
            upcoming[id] = producers.following(share.sending.last_sequence)
            shares.append(share)
        self._commit_patiently(shares)
        self._next = upcoming
        for share in shares:
            self.sent += share.messages
            self._topics.coordinator.metrics.messages_sent.add(share.messages)
        return [Delivered(share.number, share.base, share.places) for share in shares]

    def _renew(self) -> None:
        with self._topics.store.status.write() as cur:
            self.producer = producers.renew(cur, self.producer, clock.now_micros())
        self._next.clear()
        self._unsure = False

    # -- encoding ----------------------------------------------------------------------

    def _share(self, number: int, messages: pa.RecordBatch, first: int) -> _Share:
        partition_id = self._topic.partitions[number]
        options = self._topic.options
        batches = []
        places: list[int] = []
        count = 0
        whole = True
        at = now_micros()
        for part, chunk in cut_messages(messages, options.max_message_bytes):
            batches.append(
                core.encode_batch(
                    part,
                    timestamp=at,
                    producer_id=self.producer.id,
                    epoch=self.producer.epoch,
                    base_sequence=producers.following(first, count),
                    codec=options.compression,
                    chunk=chunk,
                )
            )
            if chunk is None:
                places.extend(range(count, count + part.num_rows))
            else:
                whole = False
                if chunk.piece == chunk.pieces - 1:  # where readers have the message
                    places.append(count)
            count += part.num_rows
        return _Share(
            number,
            partition_id,
            batches,
            count,
            len(places),
            None if whole else places,
            Sending(partition_id, first, producers.last_of(first, count)),
        )

    # -- committing --------------------------------------------------------------------

    def _commit_patiently(self, shares: list[_Share]) -> None:
        began = time.monotonic()
        tries = 0
        unsure: CommitOutcomeUnknownError | None = None
        while True:
            try:
                self._commit(shares)
                return
            except CommitOutcomeUnknownError as error:
                unsure = failed = error
            except OutOfOrderSequenceError:
                self._unsure = True  # its numbers mean nothing here any more
                raise
            except TxnkvError as error:
                if not error.retriable:
                    self._unsure = unsure is not None
                    raise
                failed = error  # type: ignore[assignment]
            if time.monotonic() - began > self.patience:
                self._unsure = unsure is not None
                raise unsure or failed
            tries += 1
            time.sleep(back_off(tries, _FIRST_PAUSE, _LONGEST_PAUSE))

    def _commit(self, shares: list[_Share]) -> None:
        if not self._numbered:
            self._commit_once(shares, looked=True)
            return
        ids = {share.partition_id for share in shares}
        try:
            self._look(ids - self._sure)
            self._commit_once(shares, looked=False)
        except _DoubtedError:  # a sender of another process may have left numbers alone
            self._look(ids)
            self._commit_once(shares, looked=True)

    def _look(self, ids: Iterable[int]) -> None:
        """See to it that no numbers are without messages; logs that are compacted have none."""
        for id in ids if self._topic.options.cleanup != "compact" else ():
            append.forget_lost(self._topics, id, self.producer.id)
            self._sure.add(id)

    def _commit_once(self, shares: list[_Share], *, looked: bool) -> None:
        topics = self._topics
        version = topics.require_writable(self._topic)
        partition_ids = [share.partition_id for share in shares]
        topics.refuse_held(partition_ids)
        if self._numbered and self._append(shares, looked=looked):
            return
        now = clock.now_micros()
        there: list[SentBatch | None] = []

        def validate(cur: apsw.Cursor, _: Timestamp) -> None:
            topics.refuse_dropped(cur, version, [self._topic], partition_ids)
            there[:] = producers.check(cur, self.producer, [s.sending for s in shares], now)
            if any(there) and not looked:
                raise _DoubtedError
            if all(there):
                raise _AllThereError

        def write(cur: apsw.Cursor, stamp: Timestamp) -> list[Section]:
            sections = []
            sent = []
            fresh: dict[int, list[_Share]] = {}
            for share, known in zip(shares, there, strict=True):
                if known is None:
                    fresh.setdefault(share.partition_id, []).append(share)
            for id, some in fresh.items():
                count = sum(share.count for share in some)
                base = end = topic_catalog.take_offsets(cur, id, count)
                for share in some:
                    sent.append((id, share.at(end, now)))
                    end += share.count
                batches = [batch for share in some for batch in share.batches]
                placed = core.place(b"".join(batches) if batches[1:] else batches[0], base, stamp)
                sections.append(Section(payload.TOPIC, id, placed, base, count))
            messages = sum(share.messages for some in fresh.values() for share in some)
            producers.record(cur, self.producer, sent, messages)
            return sections

        ids = topics.coordinator.ids
        txn_id = ids.begin()
        size = sum(share.size for share in shares)
        try:
            topics.log.commit(SmallCommit(txn_id, (), validate, write, size))
        except _AllThereError:
            pass
        finally:
            ids.ended(txn_id)
        for share, known in zip(shares, there, strict=True):
            if known is not None:
                share.base = known.first_offset

    def _append(self, shares: list[_Share], *, looked: bool) -> bool:
        """Append many bytes to a log directly; False where a commit of the commit log is to be."""
        id = shares[0].partition_id
        partition = self._topics.partition(id)
        if len(shares) > 1 or shares[0].size < _ALONE_BYTES or partition is None:
            return False
        if self._topic.options.cleanup == "compact":  # a batch may go there, and was not lost
            return False
        (share,) = shares
        now = clock.now_micros()
        noted: list[SentBatch] = []

        def note(cur: apsw.Cursor, base: int) -> None:
            if noted:  # the log was full and is larger now: those offsets hold nothing
                producers.take_back(cur, self.producer.id, id, noted.pop())
            (known,) = producers.check(cur, self.producer, [share.sending], now)
            if known is not None and not looked:
                raise _DoubtedError
            if known is not None:
                share.base = known.first_offset
                raise _AllThereError
            noted.append(share.at(base, now))
            producers.record(cur, self.producer, [(id, noted[0])], share.messages)

        self._sure.discard(id)
        with suppress(_AllThereError):
            append.append_alone(self._topics, partition, share.batches, note=note)
        self._sure.add(id)
        return True
