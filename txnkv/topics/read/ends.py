"""The ends of a topic's partitions, asked of status.db for all of them at once.

Whatever a reader may see next takes an offset first: a message, the end marker of a transaction,
a filler. So a partition in which a look found nothing up to its end has nothing new while its next
offset is that end, and need not be looked at, nor its environment be opened:

    partition      0     1     2     3                 a poll looks at 2 alone, whether there
    nothing at    40    12     7     0                 are four partitions or four thousand
    next offset   40    12     9     0
"""

from __future__ import annotations

from txnkv.storage import shielded
from txnkv.topics.read.offset_reader import PartitionReader
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Topics


class Ends:
    """The next offsets of a topic. No I/O while nothing is written in the store."""

    def __init__(self, topics: Topics, topic: TopicInfo) -> None:
        self._topics = topics
        self._topic = topic
        self._number: int | None = None
        self._offsets: dict[int, int] = {}
        # The log of a copy is written first, its next offset later.
        self._says_all = topic.options.replica_of is None

    @shielded
    def look(self) -> None:
        """Read the next offsets as they are now; those of commits not durable yet are seen."""
        status = self._topics.store.status
        number = status.change_number()
        if number is not None and number == self._number:
            return
        with status.read(durable=False) as cur:
            found = cur.execute(
                "SELECT id, next_offset FROM partitions WHERE topic_id = ?", (self._topic.id,)
            )
            self._offsets = dict(found)
        self._number = number

    def has_new(self, partition_id: int, reader: PartitionReader) -> bool:
        """Tell whether there may be something that the last look of a reader did not find."""
        at = reader.empty_at
        return at is None or not self._says_all or self._offsets.get(partition_id) != at

    def is_ahead(self, partition_id: int, reader: PartitionReader) -> bool:
        """Tell whether more was given than a reader's last look found: it is on its way."""
        at = reader.empty_at
        return at is not None and self._offsets.get(partition_id, 0) > at
