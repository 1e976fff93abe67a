"""What attempts of one `client.run` have acknowledged, and failed with.

attempt 1   ack(m) ... conflict: aborted      m is not delivered: attempt 2 works on it
attempt 2   ack(m) ... committed              m is deleted
run is over                                   what no attempt deleted is delivered again
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from txnkv.topics import pending_acks

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine


class Hold:
    """One run. Making one costs nothing; `release` ends it, once."""

    def __init__(self, engine: TopicEngine) -> None:
        self._engine = engine
        self.id = int.from_bytes(os.urandom(7), "big") + 1
        self.in_memory = False
        self.in_status = False

    def release(self) -> None:
        """Let what was acknowledged, and not committed, be delivered again."""
        if self.in_memory:
            self.in_memory = False
            self._engine.subscriptions.end_hold(self.id)
        if self.in_status:
            self.in_status = False
            with self._engine.store.status.write(sync=False) as cur:
                pending_acks.end_hold(cur, self.id)
