"""Checking typed values: that every one that a reader can be given is of its topic's schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from txnkv.errors import CorruptionError, TxnkvError
from txnkv.topics.log_view import bounds
from txnkv.topics.offset_reader import OffsetReader
from txnkv.topics.partition import Partition
from txnkv.topics.topics import Topics

_ROWS: Final = 1 << 16


def problems(topics: Topics, partition: Partition) -> Iterator[str]:
    """Yield what is wrong with the values of a partition, one line each.

    It ends with the first batch that is damaged itself, which others report.
    """
    codec = partition.topic.options.codec
    if codec is None:
        return
    try:
        offset = bounds(topics, partition).start
        reader = OffsetReader(topics, partition, offset, "read_uncommitted")
        while reader.load() or reader.moved:
            if reader.moved:
                continue
            rows = reader.take(_ROWS)
            try:
                codec.decode(rows.column("value"))
            except CorruptionError as error:
                yield f"from offset {rows.column('offset')[0]} on: {error}"
    except TxnkvError:
        return  # damaged, or gone meanwhile
