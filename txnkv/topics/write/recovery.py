"""After a power loss: offsets that are in a log, and that status.db does not know to be given.

An append is durable in its log while the reservation of its offsets is still on the way to the
disk (`append`), and the power may go just then:

    status.db     next offset            58           the reservation of [58, 64) is lost
    LMDB          [ 0 .................. 58 ..... 64 )

Nobody was told that these messages are there, and somebody may have read them. So they stay, and
what their reservation had said is said again: the next offset, and a clock that is not behind
their commit. Whoever opens the store first after the machine was started does it, before it gives
an offset to anybody; in a store in use a log never ends above its next offset.
"""

from __future__ import annotations

import logging

import apsw

from txnkv.errors import TxnkvError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import topic_catalog
from txnkv.topics.partition import Partition
from txnkv.topics.topics import Topics

_LOG = logging.getLogger("txnkv")
_ALL = 1 << 62

declare_fault_point("offsets.regained", "offsets that only a log knew are given in status.db again")


def regain(topics: Topics) -> None:
    """Give the offsets that logs have, unless somebody did since the machine was started.

    Raises:
        StorageFullError: no room; nothing was changed.
        UnavailableError: the disk failed.
    """
    runtime = topics.store.runtime
    if runtime.regained:
        return
    ahead = [partition for partition in _partitions(topics) if _is_ahead(topics, partition)]
    if ahead:
        with topics.store.status.write() as cur:
            topics.coordinator.damage.each(ahead, "its end", lambda each: _regain(cur, each))
        fault_point("offsets.regained")
    runtime.note_regained()


def _partitions(topics: Topics) -> list[Partition]:
    with topics.store.status.read() as cur:
        found = [topic_catalog.get(cur, name) for name in topic_catalog.names(cur)]
    return [partition for topic in found for partition in topics.partitions(topic)]


def _is_ahead(topics: Topics, partition: Partition) -> bool:
    with topics.store.status.read() as cur:
        given = topic_catalog.next_offset(cur, partition.id)
    try:
        if not partition.exists:
            return False
        environment = partition.environment
        with environment.read() as txn:
            end = partition.log.end(txn)
        environment.close(timeout=0)  # there may be many, and few are used soon
    except TxnkvError as error:
        # Those who use the partition are told; all others go on.
        _LOG.warning("%s cannot be looked at: %s", partition.label, error)
        return False
    return end > given


def _regain(cur: apsw.Cursor, partition: Partition) -> None:
    # Read again: another process may have done it meanwhile, and gone on.
    given = topic_catalog.next_offset(cur, partition.id)
    with partition.environment.read() as txn:
        end = partition.log.end(txn)
        commits = partition.log.commits(txn, given, _ALL) if end > given else []
    if end <= given:
        return
    topic_catalog.take_offsets(cur, partition.id, end - given)
    stamp = max((entry.commit_ts for entry in commits), default=0)
    cur.execute(
        "UPDATE clock SET last_timestamp = max(last_timestamp, :stamp), "
        "last_commit = max(last_commit, :stamp)",
        {"stamp": stamp},
    )
    _LOG.warning("%s: %d messages outlived their offsets", partition.label, end - given)
