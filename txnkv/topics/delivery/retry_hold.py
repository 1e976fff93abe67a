"""Messages that attempts of one `client.run` have acknowledged, and failed with.

attempt 1   ack(m) ... conflict: aborted      m is not delivered: attempt 2 works on it
attempt 2   ack(m) ... committed              m is deleted
run is over                                   what no attempt deleted is delivered again
"""

from __future__ import annotations

import os
from contextlib import suppress

from txnkv.errors import ClosedError
from txnkv.storage import WhenDropped, shielded
from txnkv.topics.acks import pending_ack_rows
from txnkv.topics.topics import Topics


class _Where:
    """The places where acks of a run are kept."""

    def __init__(self) -> None:
        self.in_memory = False
        self.in_status = False


class Hold:
    """One run. `release` lets what was acknowledged, and not committed, be delivered again; so it
    is when this is dropped.
    """

    def __init__(self, topics: Topics) -> None:
        self.id = int.from_bytes(os.urandom(7), "big") + 1
        self.where = _Where()
        self._over = WhenDropped(self, _end, topics, self.id, self.where)

    @shielded
    def release(self) -> None:
        """The run is over. Twice is fine."""
        self._over()


def _end(topics: Topics, id: int, where: _Where) -> None:
    if where.in_memory:
        topics.local.end_hold(id)
    if where.in_status:
        with suppress(ClosedError), topics.store.status.write(sync=False) as cur:
            pending_ack_rows.end_hold(cur, id)
