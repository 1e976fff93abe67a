"""What a subscription is: its name, its kind and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from txnkv.topics.catalog import TopicInfo

EXCLUSIVE: Final = "exclusive"
SHARED: Final = "shared"


@dataclass(frozen=True)
class SubscriptionInfo:
    """A subscription as status.db has it. Picklable: processes that join a transaction by its
    token acknowledge by it.

    Attributes:
        id: in status.db.
        topic: of which topic.
        name: unique in the topic.
        type: "exclusive" or "shared".
        lease_seconds: for how long a message of a shared one is one consumer's.
        max_deliveries: after so many a message goes to the dead letter topic; None: never.
        dead_letter: name of that topic.
        redelivery_delay: seconds from a negative ack to the next delivery.
    """

    id: int
    topic: TopicInfo
    name: str
    type: str
    lease_seconds: float = 30.0
    max_deliveries: int | None = None
    dead_letter: str | None = None
    redelivery_delay: float = 0.0

    @property
    def leased(self) -> bool:
        """Whether deliveries are rows in status.db: where several processes share them, or where
        they are counted, also over the death of the consumer.
        """
        return self.type == SHARED or self.max_deliveries is not None

    def __str__(self) -> str:
        return f"subscription {self.name!r} of topic {self.topic.name!r}"
