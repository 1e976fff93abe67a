"""Topics as a user holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Unpack

import pyarrow as pa

from txnkv.client.consumer import Consumer
from txnkv.client.producer import Producer
from txnkv.client.subscription import Subscription
from txnkv.errors import ClosedError, TopicNotFoundError, as_index, as_offsets, require_count
from txnkv.storage import shielded
from txnkv.topics import (
    HELD_BYTES,
    Bounds,
    FetchIsolation,
    FetchResult,
    Order,
    Partition,
    ReadIsolation,
    Start,
    SubscriptionOptions,
    SubscriptionType,
    TopicChanges,
    TopicEngine,
    TopicInfo,
    Waiting,
    bounds,
    delete_after,
    delete_below,
    fetch,
    topic_catalog,
)
from txnkv.transaction import Closing, Connection, Grid, ValueSchema, evolved_values


class Topic(Closing):
    """A topic. Shared by threads.

    It is sent to by transactions and sessions (`txn.send`), or by a `producer`.
    """

    def __init__(self, connection: Connection, info: TopicInfo) -> None:
        self._connection = connection
        self.info = info

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def partitions(self) -> int:
        """The number of partitions, as it is now; they are numbered from 0."""
        with suppress(TopicNotFoundError, ClosedError):  # as it was, then
            self._engine()
        return len(self.info.partitions)

    @property
    def buffer(self) -> str:
        """The place where messages of open transactions wait: "marker" or "sidecar"."""
        return self.info.buffer

    @property
    def value_schema(self) -> pa.Schema | None:
        """The columns of values, as they are by now, or were when the topic was dropped or the
        client closed; None where values are bytes.
        """
        self._look()
        return self.info.options.value_schema

    @property
    def options(self) -> TopicChanges:
        """The options that `alter` changes, as they are now; as they were, once the topic was
        dropped or the client closed.
        """
        self._look()
        return self.info.options.changeable

    def _look(self) -> None:
        """Know the topic as it is now, if it is there."""
        with suppress(TopicNotFoundError, ClosedError):
            self._engine()

    def __repr__(self) -> str:
        return (
            f"<Topic {self.name!r}, {len(self.info.partitions)} partitions, {self.buffer} buffer>"
        )

    def _grid(self) -> Grid:
        head = ["partition", "end", "last stable offset"]
        return head, [
            (number, found.high_watermark, found.last_stable_offset)
            for number, found in self._bounds().items()
        ]

    def close(self) -> None:
        """Nothing to give up: the topic stays, and other handles of it."""

    # -- reading -----------------------------------------------------------------------

    @shielded
    def end_offsets(self) -> dict[int, int]:
        """For each partition the offset behind its last message, of whatever transaction."""
        return {number: found.high_watermark for number, found in self._bounds().items()}

    @shielded
    def last_stable_offsets(self) -> dict[int, int]:
        """For each partition the offset up to which readers of committed messages get: that of
        the first message of a transaction that is open, or the end.
        """
        return {number: found.last_stable_offset for number, found in self._bounds().items()}

    def fetch(
        self,
        partition: int,
        offset: int,
        max_bytes: int = 1 << 20,
        isolation: FetchIsolation = "read_committed",
    ) -> FetchResult:
        """Raw batches of one partition, unfiltered.

        Args:
            partition: its number.
            offset: of the first message wanted; the batches begin with the one that holds it.
            max_bytes: of the batches when they are decoded; at least one batch.
            isolation: "read_committed": below the last stable offset, with the list of aborted
                transactions; "read_uncommitted": all there is.

        Raises:
            OffsetOutOfRangeError: the offset is below the log's start or above its end.
            ValueError: there is no such partition.
        """
        offset, most = as_index("offset", offset), min(as_index("max_bytes", max_bytes), 1 << 62)
        require_count("max_bytes", most, "bytes")
        engine = self._engine()
        return fetch(engine, self._partition(partition, engine), offset, most, isolation)

    @shielded
    def consumer(
        self,
        isolation: ReadIsolation = "read_committed",
        order: Order = "offset",
        start: Start | Mapping[int, int] = "earliest",
        partitions: Sequence[int] | None = None,
        max_bytes: int = HELD_BYTES,
    ) -> Consumer:
        """A reader of messages, of its own position.

        Args:
            isolation: "read_committed", "read_uncommitted", or "serializable": transactions
                whole, over all partitions, in the order of their commits.
            order: "offset" or "commit".
            start: "earliest", "latest", or offsets by partition.
            partitions: their numbers; by default all, those that are added later too.
            max_bytes: of messages in memory: read ahead from all partitions, and of one `poll`.
        """
        from txnkv.client.consumer import Consumer

        self._engine()
        return Consumer(
            self._connection,
            self.info,
            isolation=isolation,
            order=order,
            start=start,
            partitions=partitions,
            max_bytes=max_bytes,
        )

    @shielded
    def subscribe(
        self,
        name: str,
        type: SubscriptionType = "exclusive",
        start: Start | Mapping[int, int] = "earliest",
        partitions: Sequence[int] | None = None,
        max_bytes: int = HELD_BYTES,
        **options: Unpack[SubscriptionOptions],
    ) -> Subscription:
        """A consumer whose position is kept in the store, moved by acknowledgements.

        Args:
            name: of the subscription; it is made when there is none.
            type: "exclusive": one consumer at a time; "failover": the same, and others wait for
                its place; "shared": messages are leased to many; "key_shared": the same, those of
                one key to one at a time, in order.
            start: where a new one begins: "earliest", "latest", or offsets by partition.
            partitions: their numbers; by default all, those that are added later too.
            max_bytes: of messages in memory: read ahead from all partitions, and of one call.
            **options: see `txnkv.client.subscription.subscribe`; those that are not named stay as
                they are.
        """
        from txnkv.client.subscription import subscribe

        self._connection.require_writable()
        self._engine()
        return subscribe(
            self._connection, self.info, None, name, type, start, partitions, max_bytes, **options
        )

    @shielded
    def subscriptions(self) -> list[str]:
        """The names of its subscriptions, sorted."""
        return [info.name for info in self._engine().subscriptions.of_topic(self.info)]

    @shielded
    def drop_subscription(self, name: str, missing_ok: bool = False) -> None:
        """Forget a subscription at once: what it had deleted and delivered. Open transactions that
        acknowledged its messages are aborted, a consumer of it is told at its next call. One that
        is made under this name later begins anew.

        Raises:
            TopicNotFoundError: there is none of this name, and `missing_ok` is false; or the
                topic was dropped.
        """
        self._connection.require_writable()
        subscriptions = self._engine().subscriptions
        found = subscriptions.find(self.info, name)
        if (found is None or not subscriptions.drop(found)) and not missing_ok:
            raise TopicNotFoundError(
                f"topic {self.name!r} has no subscription {name!r} to drop; it has: "
                f"{', '.join(self.subscriptions()) or 'none'}"
            )

    # -- writing -----------------------------------------------------------------------

    @shielded
    def producer(self, name: str | None = None, **options: Any) -> Producer:
        """An idempotent producer; a later one of the same name fences this one.

        Args:
            name: of the producer; without one it is nobody else's.
            **options: see `txnkv.Producer`.
        """
        from txnkv.client.producer import Producer

        self._connection.require_writable()
        self._engine()
        return Producer(self._connection, self.info, name, **options)

    # -- changing ----------------------------------------------------------------------

    @shielded
    def alter(
        self,
        partitions: int | None = None,
        value_schema: ValueSchema | None = None,
        **changes: Unpack[TopicChanges],
    ) -> TopicChanges:
        """Change options, at once and durably; those that are not named stay as they are.

        Messages that are there stay as they are. Whoever sends from then on compresses as the topic
        says by then. Retention goes by the
        new options from its next round on, at most a minute later.

        Partitions may be added. Consumers and subscriptions of all partitions read them too, from
        their beginning; whoever sends from then on spreads over all of them, so that a key may go
        to another partition than its messages of before: their order holds in each, not over both.

        Values get another schema by the rules by which tables are altered: what is there is read
        as if it had been sent by the new one, and who still sends by the one before does no harm.
        A topic of dead letters with the same schemas gets it, too.

        Args:
            partitions: how many there are to be, at least as many as there are.
            value_schema: the columns of values: those that there are, of the same or wider types,
                nullable where they are, or from now on; and others, which are nullable or have a
                default, and come behind them.
            **changes: `compression`, `retention_seconds`, `retention_bytes`,
                `retain_unacknowledged`, `cleanup`, `tombstone_seconds`, as `client.create_topic`
                takes them.

        Returns:
            All of these, as they are now.

        Raises:
            TypeError: another option is named: it stays as it was made.
            ValueError: one makes no sense, or the topic has more partitions. Nothing was changed.
            NotSupportedError: the topic is a copy, which has the options of the other store; or it
                is to be compacted and has buffer="sidecar".
            SchemaError: values that are there could not be read by this schema, or are bytes.
                Nothing was changed.
            TopicNotFoundError: the topic was dropped.
        """
        self._connection.require_writable()
        engine = self._engine()
        topic_catalog.require_writable(self.info, "alter")
        values_of = None if value_schema is None else evolved_values(value_schema)
        self.info = engine.alter(self.info, changes, partitions, values_of)
        return self.info.options.changeable

    @shielded
    def truncate(
        self,
        before: int | Mapping[int, int] | Literal["latest"] | None = None,
        *,
        after: int | Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Give up the messages below an offset, or those behind one, durably and for good.

        Readers below the first that stays get OffsetOutOfRangeError. Those behind the last one go
        on where they are: offsets that were cut off are never given again. What subscriptions had
        not acknowledged is counted as lost, and warned of; what lies below is not delivered any
        more, though it was read ahead. Space comes back by whole segments.

        Args:
            before: offsets of the first messages that stay, by partition; an offset, of a topic
                with one partition; or "latest": all goes that is decided, but what the topic keeps
                for subscriptions (`retain_unacknowledged`).
            after: offsets of the last messages that stay, likewise; -1: none of a partition that
                begins at 0. Messages that were committed together stay or go together.

        Returns:
            The first offset of each partition that was named, or of all; with `after` the offset
            that its next message gets.

        Raises:
            OffsetOutOfRangeError: a partition does not hold the offset, or keeps for a
                subscription what would go; with `before`, an open transaction has messages below
                it; with `after`, it stands among messages that were committed together. The
                partition has all that it had; those of lower numbers were truncated.
            InvalidTxnStateError: with `after`: a transaction that is open, or that began before it
                and ended behind it, has messages there. The same.
            NotSupportedError: the topic is a copy of one of another store.
            TopicNotFoundError: the topic was dropped.
            UnavailableError: with `after`: others wrote all the time. Try again.
            TypeError: an offset is not a number. Nothing was truncated.
            ValueError: there is no such partition, or it is not said which, or not one of `before`
                and `after` is given. The same.
        """
        self._connection.require_writable()
        engine = self._engine()
        if (before is None) == (after is None):
            raise ValueError("truncate takes one of before= and after=")
        if before == "latest":
            parts = engine.partitions(self.info)
            return {part.number: delete_below(engine, part, None) for part in parts}
        if before is not None:
            return {
                part.number: delete_below(engine, part, offset)
                for part, offset in self._places("before", before)
            }
        flush = self._connection.instance.engine.flush
        return {
            part.number: delete_after(engine, part, offset, flush)
            for part, offset in self._places("after", after)
        }

    # -- inside ------------------------------------------------------------------------

    def _engine(self) -> TopicEngine:
        self._connection.require_open()
        engine = self._connection.instance.topics
        self.info = engine.current(self.info)
        return engine

    def _waiting(self, until: int | None, check: Callable[[], bool]) -> Waiting | None:
        """A wait for something new, or until `check` tells; None: it is done on another host."""

        def is_stirred() -> bool:
            self._connection.require_open()
            return check()

        return Waiting(self._connection.instance.topics.watch, until, is_stirred)

    def _places(self, side: str, offsets: Any) -> list[tuple[Partition, int]]:
        """Partitions that are named, ascending, with an offset of each."""
        if not isinstance(offsets, Mapping):
            if self.partitions > 1:
                raise ValueError(
                    f"topic {self.name!r} has {self.partitions} partitions: say which, as "
                    f"truncate({side}={{0: {offsets}}})"
                )
            offsets = {0: offsets}
        places = sorted(as_offsets(offsets).items())
        return [(self._partition(number), offset) for number, offset in places]

    def _partition(self, number: int, engine: TopicEngine | None = None) -> Partition:
        number = as_index("a partition", number)
        if not 0 <= number < self.partitions:
            raise ValueError(
                f"there is no partition {number}: topic {self.name!r} has {self.partitions}, "
                f"numbered from 0 to {self.partitions - 1}"
            )
        return (engine or self._engine()).partitions(self.info)[number]

    def _bounds(self) -> dict[int, Bounds]:
        engine = self._engine()
        return {
            partition.number: bounds(engine, partition)
            for partition in engine.partitions(self.info)
        }
