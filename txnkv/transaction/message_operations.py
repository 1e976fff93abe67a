"""The operations on topics and subscriptions that sessions and transactions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from txnkv.topics.message import Message, MessageId
from txnkv.topics.subscription_info import SubscriptionInfo
from txnkv.transaction.write_result import WriteResult

if TYPE_CHECKING:
    from txnkv.client.subscription import Subscription
    from txnkv.client.topic import Topic

Acknowledged = Message | MessageId | Sequence[Message | MessageId]
"""A message, its id, or several."""

AnySubscription: TypeAlias = "Subscription | SubscriptionInfo"
"""A subscription, or what names it in another process."""


class MessageOperations(ABC):
    """Sending and acknowledging.

    In a transaction all of it takes effect at its commit, together with its rows, or not at all.
    """

    @abstractmethod
    def send(
        self,
        topic: str | Topic,
        value: Any,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
    ) -> None:
        """Send one message.

        Args:
            topic: to which.
            value: bytes; text is sent as UTF-8. Where the topic has a value schema, a row of it:
                a dict, a tuple in schema order or a dataclass. None: no value.
            key: bytes or text. Messages of one key go to one partition, in their order.
            partition: the number of the partition; by default it follows from the key, and
                without one all that is flushed together goes to one.
            headers: pairs of a name and bytes, or a mapping.
            timestamp: an aware datetime; by default the time of the flush.

        Raises:
            TypeError, ValueError: one of these is not what it should be.
            SchemaError: the value is not of the topic's value schema.
            TopicNotFoundError: there is no such topic, or it was dropped.
            InvalidTxnStateError: the transaction is not open.
        """

    @abstractmethod
    def send_batch(self, topic: str | Topic, data: Any) -> WriteResult:
        """Send Arrow data at once, behind the messages that wait.

        Args:
            topic: to which.
            data: pyarrow, pandas, polars, or any object with `__arrow_c_stream__` or
                `__arrow_c_array__`: column value (binary or string), and where wanted key,
                headers (binary as a reader gives them, map, or list of name and value),
                timestamp (with a time zone) and partition. Where the topic has a value schema,
                its columns in place of value; a row in which all of them are null has no value.

        Raises:
            SchemaError: a column is missing, not known or of another type. Nothing is sent.
            ValueError: there is no such partition. Nothing is sent; of a stream, nothing
                from there on.
            TopicNotFoundError: there is no such topic, or it was dropped.
            InvalidTxnStateError: the transaction is not open.
            StorageFullError, UnavailableError: the disk is full or failed. Outside of a
                transaction, and in an attempt of a job, nothing was sent. Else what was taken
                goes with the next flush or the commit; call it again with the same object, and
                all of it is sent once.
        """

    @abstractmethod
    def _acknowledge(
        self, subscription: AnySubscription, message: Acknowledged, *, cumulative: bool
    ) -> None:
        """Take an acknowledgement."""

    def ack(self, subscription: AnySubscription, message: Acknowledged) -> None:
        """Acknowledge a message, its id, or a list of them: with the commit they are done with.

        Raises:
            AckConflictError: another transaction acknowledged it first, or it is done with. The
                transaction was aborted.
            InvalidTxnStateError: the transaction is not open.
            NotSupportedError: in an attempt of a job.
        """
        self._acknowledge(subscription, message, cumulative=False)

    def ack_cumulative(self, subscription: AnySubscription, message: Acknowledged) -> None:
        """Acknowledge all messages of a partition up to this one; of an exclusive subscription.

        Raises:
            AckConflictError: as for `ack`.
            InvalidTxnStateError: the transaction is not open.
        """
        self._acknowledge(subscription, message, cumulative=True)


def ids_of(message: Acknowledged) -> list[MessageId]:
    """The ids of what is acknowledged.

    Raises:
        TypeError: it is no message, id or list of them.
    """
    if isinstance(message, Message):
        return [message.id]
    if isinstance(message, MessageId):
        return [message]
    if isinstance(message, list | tuple):
        if len(message) == 1:
            return ids_of(message[0])
        return [one for some in message for one in ids_of(some)]
    raise TypeError(
        "what is acknowledged is a Message, its MessageId or a list of them, not "
        f"{type(message).__name__}"
    )


def info_of(subscription: AnySubscription) -> SubscriptionInfo:
    """Return the info that names a subscription.

    Raises:
        TypeError: the argument is no subscription.
    """
    found = getattr(subscription, "info", subscription)
    if not isinstance(found, SubscriptionInfo):
        raise TypeError(
            f"a subscription is what topic.subscribe(...) gives, not {type(found).__name__}"
        )
    return found
