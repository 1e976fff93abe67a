"""Control batches and offsets of a log as the engine wrote it."""

from __future__ import annotations

import errno

import txnkv
from tools.topic_contents import raw
from txnkv import core
from txnkv.storage import disarm


def controls(client: txnkv.Client, topic: str = "events") -> list[tuple[int, str, int]]:
    """Offset, type and transaction of each control batch."""
    data = raw(client, topic)
    return [
        (header.base_offset, core.read_control(data, at).type.name, header.txn_id)
        for at, header in core.walk(data)
        if header.is_control
    ]


def offsets(client: txnkv.Client, topic: str = "events") -> list[tuple[int, int]]:
    """First offset and count of every batch, data and control."""
    return [(h.base_offset, h.count) for _, h in core.walk(raw(client, topic))]


def is_dense(client: txnkv.Client, topic: str = "events") -> bool:
    at = 0
    for first, count in offsets(client, topic):
        if first != at:
            return False
        at += count
    return True


def no_room() -> None:
    disarm()
    raise OSError(errno.ENOSPC, "no room")
