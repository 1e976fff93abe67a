"""The description of a subscription: its name, its kind and its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypedDict

from txnkv.topics.topic_catalog import TopicInfo

EXCLUSIVE: Final = "exclusive"
SHARED: Final = "shared"
FAILOVER: Final = "failover"


class SubscriptionOptions(TypedDict, total=False):
    """Options that a call names; those that it does not name stay as they are."""

    lease_seconds: float
    max_deliveries: int | None
    dead_letter: str | None
    redelivery_delay: float
    ack_timeout: float | None


@dataclass(frozen=True)
class SubscriptionInfo:
    """A subscription as status.db has it. Picklable: processes that join a transaction by its
    token acknowledge by it.

    Attributes:
        id: in status.db.
        topic: of which topic.
        name: unique in the topic.
        type: "exclusive", "shared", or "failover": exclusive, and consumers wait for the place.
        lease_seconds: for how long a message of a shared one is one consumer's.
        max_deliveries: after so many a message goes to the dead letter topic; None: never.
        dead_letter: name of that topic.
        redelivery_delay: seconds from a negative ack to the next delivery.
        ack_timeout: seconds after which a message of an exclusive one is delivered again unless
            an ack of it was made; None: never.
    """

    id: int
    topic: TopicInfo
    name: str
    type: str
    lease_seconds: float = 30.0
    max_deliveries: int | None = None
    dead_letter: str | None = None
    redelivery_delay: float = 0.0
    ack_timeout: float | None = None

    @property
    def leased(self) -> bool:
        """Tell whether deliveries are rows in status.db: where several processes share them, or
        where they are counted, also over the death of the consumer, or end.
        """
        return self.type == SHARED or (self.max_deliveries, self.ack_timeout) != (None, None)

    def changed(self, options: SubscriptionOptions) -> SubscriptionInfo:
        """With these options, the dead letter topic following from `max_deliveries`.

        Raises:
            TypeError: there is no such option.
        """
        unknown = options.keys() - SubscriptionOptions.__annotations__.keys()
        if unknown:
            names = ", ".join(SubscriptionOptions.__annotations__)
            raise TypeError(f"a subscription has options {names}, not {', '.join(sorted(unknown))}")
        info = replace(self, **options)
        if info.max_deliveries is None and "dead_letter" not in options:
            return replace(info, dead_letter=None)
        if info.max_deliveries is not None and info.dead_letter is None:
            return replace(info, dead_letter=f"{info.topic.name}.{info.name}.dead")
        return info

    @property
    def lease_time(self) -> float | None:
        """Seconds for which a delivered message is its consumer's; None: until that ends."""
        return self.lease_seconds if self.type == SHARED else self.ack_timeout

    def __str__(self) -> str:
        return f"subscription {self.name!r} of topic {self.topic.name!r}"
