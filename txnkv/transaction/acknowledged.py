"""Messages and subscriptions as calls name them to acknowledge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from txnkv.topics import Message, MessageId, SubscriptionInfo

Acknowledged: TypeAlias = Message | MessageId | Sequence[Message | MessageId]
"""A message, its id, or several."""


class NamesSubscription(Protocol):
    """A `Subscription`."""

    @property
    def info(self) -> SubscriptionInfo:
        """The subscription, for other processes too."""


AnySubscription: TypeAlias = NamesSubscription | SubscriptionInfo
"""A subscription, or what names it in another process."""


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
