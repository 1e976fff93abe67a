"""The position of a stream over a topic, as Spark writes it into its checkpoint.

    {"store": "5f..", "topic": "events", "id": 3, "order": "offset",
     "offsets": {"0": 170, "1": 95}, "since": {"0": 120, "1": 80}, "begin": {"0": 0, "1": 0}}

`offsets` are the ends of a batch and the starts of the next one, by partition. In commit order
they are places of commits, and `timestamp` says up to which commit all partitions are read.
`since` is where the batch began: Spark writes no start of a query's first batch, and asks for
another when it runs that batch again. `begin` is where the log began when the query did: what
retention took before that is no loss to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Offsets = dict[int, int]


@dataclass(frozen=True)
class TopicOffset:
    """A point of a topic.

    Attributes:
        store: the store's id.
        topic, id: its name, and the id that tells it from others that had its name.
        order: "offset" or "commit".
        offsets: by partition.
        begin: by partition: what lies below is not looked for.
        since: in the end of a batch: where that batch begins.
        timestamp: in commit order: what was committed up to then lies below.
    """

    store: str
    topic: str
    id: int
    order: str
    offsets: Offsets
    begin: Offsets
    since: Offsets | None = None
    timestamp: int | None = None

    def json(self) -> dict[str, Any]:
        """Return this point as Spark keeps it."""
        made: dict[str, Any] = {"store": self.store, "topic": self.topic, "id": self.id}
        made["order"] = self.order
        made["offsets"] = _texts(self.offsets)
        if self.since is not None:
            made["since"] = _texts(self.since)
        made["begin"] = _texts(self.begin)
        if self.timestamp is not None:
            made["timestamp"] = self.timestamp
        return made

    @classmethod
    def parse(cls, given: Mapping[str, Any], topic: str, order: str) -> TopicOffset:
        """Return the point that `json` gave, for a query that reads this topic in this order.

        Raises:
            ValueError: `given` is of another topic or order, or no such point at all.
        """
        try:
            since = given.get("since")
            made = cls(
                store=given["store"],
                topic=given["topic"],
                id=given["id"],
                order=given["order"],
                offsets=_numbers(given["offsets"]),
                begin=_numbers(given["begin"]),
                since=None if since is None else _numbers(since),
                timestamp=given.get("timestamp"),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"the checkpoint has {given!r}, which is no place in a topic: it is of another "
                "source. Take a checkpoint of this query's own"
            ) from None
        if (made.topic, made.order) != (topic, order):
            raise ValueError(
                f"the checkpoint is of topic {made.topic!r}, order {made.order!r}, the query reads "
                f"{topic!r}, order {order!r}: take these, or a new checkpoint"
            )
        return made


def share(most: int, there: Mapping[int, int]) -> Offsets:
    """Return the number of offsets that each partition gives to a batch of about `most`.

    In proportion to what is there, and at least one, so that no partition waits behind the others.
    """
    total = sum(there.values())
    if total <= most:
        return dict(there)
    return {
        number: min(max(most * waiting // total, 1), waiting) for number, waiting in there.items()
    }


def _texts(offsets: Offsets) -> dict[str, int]:
    return {str(number): offset for number, offset in sorted(offsets.items())}


def _numbers(given: Mapping[str, int]) -> Offsets:
    return {int(number): int(offset) for number, offset in given.items()}
