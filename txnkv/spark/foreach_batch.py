"""Several sinks, one commit: a function that is called for each micro batch, in a transaction.

    Spark           checkpoint: offsets of batch 7     batch 7              checkpoint: 7 is done
    foreach_batch                                   applied? begin, mark,
                                                    ack, fn, COMMIT
                                                            |
                          tables, topics, subscription, (app id, 7): one commit point

When Spark's process dies before it has noted that batch 7 is done, it runs batch 7 again, of the
same rows. Then version 7 of the application is there, and `fn` is not called. When it dies before
the commit, what it has left open is aborted by the next run, which finds it by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from txnkv.client import Client, Planning, Subscription
from txnkv.coordinator import Mark
from txnkv.errors import InvalidTxnStateError, NotSupportedError
from txnkv.remote import Credentials
from txnkv.spark import option_table, query_progress
from txnkv.spark.settings import StorePlace
from txnkv.topics import EXCLUSIVE, MessageId, SubscriptionInfo, TopicInfo
from txnkv.transaction import Transaction

BatchFunction = Callable[[Any, int, Transaction], object]

ATTEMPTS: Final = 3


@dataclass(frozen=True)
class ForeachBatch:
    """The function that `foreach_batch` makes, and Spark calls for each micro batch."""

    place: StorePlace
    fn: BatchFunction
    app_id: str
    subscription: str | SubscriptionInfo | None
    attempts: int

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Do one batch, unless it is committed; called by Spark."""
        mark = Mark(self.app_id, batch_id, query_progress.query_id(frame))
        with self.place.connect() as client:  # of this batch alone: the store is free afterwards
            done = self._do(client, frame, mark)
        if not done:
            # What Spark itself keeps of the batch, the state of an aggregation say, comes about
            # as its rows are computed: they are, for nobody.
            frame.write.format("noop").mode("append").save()

    def _do(self, client: Client, frame: Any, mark: Mark) -> bool:
        """Do a batch in a transaction; False when it was committed before."""
        batch_id = mark.version
        name = f"foreach_batch of {mark.source} as {mark.app_id!r}"
        if _is_committed(client, frame, mark):
            return False
        # A driver that was killed may have left one that is open, and holds what was read; or one
        # in the midst of its commit, and then the batch is there.
        planning = Planning.of(client)
        planning.end_named(name)
        if _is_committed(client, frame, mark):
            return False
        with self._subscribed(client, frame, batch_id) as read:

            def work(txn: Transaction) -> None:
                planning.name(txn, [name], "")
                txn.mark_applied(mark.app_id, mark.version, mark.source)
                if read is not None:
                    read.acknowledge(txn, planning)
                with _left_open(txn, batch_id):
                    self.fn(frame, batch_id, txn)
                if planning.was_rolled_back(txn):  # or the batch would pass for done
                    raise InvalidTxnStateError(
                        f"fn rolled back the transaction of batch {batch_id}: raise an error "
                        "instead, so that the query does not go on without the batch"
                    )

            client.run(work, attempts=self.attempts, timeout=None)
        return True

    @contextmanager
    def _subscribed(self, client: Client, frame: Any, batch_id: int) -> Iterator[BatchRead | None]:
        """Yield what the batch has read for the subscription, while nobody else consumes it."""
        if self.subscription is None:
            yield None
            return
        ends = [
            end for end in query_progress.end_offsets(frame, batch_id) if _is_topic(end, client)
        ]
        if isinstance(self.subscription, SubscriptionInfo):
            info = self.subscription
            yield BatchRead(info, _ends_of(ends, info.topic, f"of {info}"))
            return
        topic = _only_topic(ends, client, self.subscription)
        found = _ends_of(ends, topic.info, f"of subscription {self.subscription!r}")
        with topic.subscribe(self.subscription) as subscription:
            yield BatchRead(subscription.info, found)


def _is_committed(client: Client, frame: Any, mark: Mark) -> bool:
    committed = query_progress.is_committed(client, mark)
    if committed:
        query_progress.require_replay(client, mark, query_progress.checkpoint_of(frame))
    return committed


_COMMITS: Final = ("commit", "commit_async", "start_commit")


@contextmanager
def _left_open(txn: Transaction, batch_id: int) -> Iterator[None]:
    """Refuse commits by this handle: the batch would pass for done, whatever comes behind them."""

    def refuse() -> None:
        raise InvalidTxnStateError(
            f"fn cannot commit the transaction of batch {batch_id}: it is committed when fn has "
            "returned, for then the batch is done. Leave out commit() and `with txn:`; what is to "
            "be there before goes into a transaction of its own"
        )

    own = vars(txn)
    own.update(dict.fromkeys(_COMMITS, refuse))
    try:
        yield
    finally:
        for name in _COMMITS:
            del own[name]


def foreach_batch(
    path: str | os.PathLike[str],
    fn: BatchFunction,
    app_id: str,
    subscription: str | Subscription | None = None,
    *,
    attempts: int = ATTEMPTS,
    credentials: Credentials | None = None,
) -> ForeachBatch:
    """A function for `writeStream.foreachBatch`: each micro batch is one transaction.

    `fn(df, batch_id, txn)` writes any number of tables and topics, by Spark jobs with
    `txnkv.spark.options(txn, table=...)` or `topic=...`, or by `txn` itself, and leaves it open.
    When it returns, the transaction commits; when it raises, nothing of the batch is there and the
    query fails. For a batch that was committed before, it is not called.

    Args:
        path: the store's directory, or the address of its server.
        fn: called in the driver; what it returns is dropped. Where the data frame is used more
            than once, `df.persist()` it; use it at least once in a query that keeps state.
        app_id: names the application in the store. Never two queries at a time have one: the
            second is refused.
        subscription: an exclusive subscription of a txnkv topic that the query reads, or its name,
            which nobody else consumes meanwhile. All that a batch has read is acknowledged in
            its transaction; the query goes by its checkpoint, the subscription follows.
        attempts: how often at most a batch is tried when the transaction meets an error that is
            retriable, as a conflict: `fn` is called again, with a new transaction.
        credentials: for a server, as `txnkv.connect` takes them; None for those of the variable
            TXNKV_CREDENTIALS, if it is set.

    Raises:
        StoreNotFoundError: there is none.
        NotSupportedError: the subscription is shared, or the path is no directory.
        ValueError, TypeError: an argument makes no sense.

    A batch fails, and with it the query, for what `fn` raises, and with

        ValueError: the application is driven by another query (this one's checkpoint is a new
            one, say), until `client.forget_applied` lets it begin anew; or batches before this one
            are missing, as in a store that was restored; or the checkpoint was, and the store has
            batches that are later, or another of this number; or the query does not read the
            subscription's topic.
        AlreadyAppliedError: another driver committed this batch meanwhile.
        UnavailableError: somebody else consumes the subscription.
        AckConflictError: another transaction holds what the batch has read.
        InvalidTxnStateError: `fn` commits the transaction, or rolls it back.
        NotSupportedError: a subscription is given, and the query is one of Spark Connect, or
            reads its topic with order=commit.
    """
    if not callable(fn):
        raise TypeError(f"fn is called with a data frame, a batch and a transaction; {fn!r} cannot")
    if attempts < 1:
        raise ValueError(f"attempts is at least 1, not {attempts}")
    found = option_table.value_of("path", option_table.place, path)
    place = StorePlace(path=found, credentials=credentials)
    named = _named(subscription)
    Mark(app_id, 0)  # refuses what is no application id
    if not _is_remote():
        place.connect().close()
    return ForeachBatch(place, fn, app_id, named, attempts)


def _named(subscription: str | Subscription | None) -> str | SubscriptionInfo | None:
    if subscription is None or (isinstance(subscription, str) and subscription):
        return subscription
    if not isinstance(subscription, Subscription):
        raise TypeError(
            "subscription is the name of one, or what topic.subscribe(...) gives, not "
            f"{subscription!r}"
        )
    if subscription.info.type != EXCLUSIVE:
        raise NotSupportedError(
            f"{subscription.info} is {subscription.info.type}: its messages are delivered to many, "
            "and a stream reads all of a topic. Take an exclusive one"
        )
    return subscription.info


def _is_remote() -> bool:
    from pyspark.sql.utils import is_remote

    return bool(is_remote())


# -- what a batch has read -------------------------------------------------------------


@dataclass(frozen=True)
class BatchRead:
    """Up to where a batch has read the topic of a subscription; offsets by partition number."""

    info: SubscriptionInfo
    ends: Mapping[int, int]

    def acknowledge(self, txn: Transaction, planning: Planning) -> None:
        """Acknowledge all that was read and is not acknowledged.

        Raises:
            AckConflictError: another transaction has acknowledged a part of it.
        """
        for number, last in planning.pending(self.info, self.ends).items():
            txn.ack_cumulative(self.info, MessageId(number, last))


def _is_topic(end: Mapping[str, Any], client: Client) -> bool:
    if not {"topic", "id", "offsets"} <= end.keys():
        return False
    return end.get("store") in (None, Planning.of(client).store_id)


def _only_topic(ends: list[dict[str, Any]], client: Client, name: str) -> Any:
    topics = sorted({end["topic"] for end in ends})
    if len(topics) != 1:
        read = f"reads the topics {', '.join(topics)}" if topics else "reads no topic of this store"
        raise ValueError(
            f"subscription {name!r} is of one topic, and the query {read}: give the subscription "
            "itself (topic.subscribe), or leave it out"
        )
    return client.topic(topics[0])


def _ends_of(ends: list[dict[str, Any]], topic: TopicInfo, what: str) -> dict[int, int]:
    """The ends in a topic; where it is read twice, up to where both have come."""
    ours = [end for end in ends if end["id"] == topic.id]
    if not ours:
        read = ", ".join(sorted({end["topic"] for end in ends})) or "no topic of this store"
        raise ValueError(
            f"the query does not read the topic {what}, {topic.name!r}; it reads {read}"
        )
    if any(end.get("order", "offset") != "offset" for end in ours):
        raise NotSupportedError(
            f"topic {topic.name!r} is read in the order of commits, and the acks {what} go by "
            "offset: read it with order=offset, or leave the subscription out"
        )
    found: dict[int, int] = {}
    for end in ours:
        for number, offset in end["offsets"].items():
            found[int(number)] = min(found.get(int(number), offset), offset)
    return found
