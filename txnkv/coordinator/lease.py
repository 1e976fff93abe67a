"""Leadership of the background work: a lease in status.db, with a term.

Any process may lead. The lease goes to whoever finds its holder dead (its slot of the
runtime file is no longer locked) or silent for `LEASE_TIME`; each change of hands raises
the term. The holder is heard in the runtime file, by a heartbeat under its term: to go on
leading costs no write. Every background write calls `confirm` in its own SQLite transaction,
so a leader that was stopped and goes on later is refused. LMDB environments do not know the term:
`tables.fence` says why what comes late changes nothing there.
"""

from __future__ import annotations

from typing import Final

import apsw

from txnkv.storage import Store, clock

LEASE_TIME: Final = 10 * 1_000_000


class LeaseLostError(Exception):
    """Another process leads now."""


class Lease:
    """This process's view of the lease of one store.

    Attributes:
        term: under which this process leads, if it does.
        unwatched: microseconds for which nobody led before it took the lease; to be set to 0 by
            whoever has taken that into account.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.term: int | None = None
        self.unwatched = 0

    def beat(self) -> bool:
        """Say that this process leads still; False when it does not, or nobody would hear."""
        runtime = self._store.runtime
        return self.term is not None and runtime.heartbeat(runtime.LEADER, self.term)

    def acquire(self) -> bool:
        """Take the lease, or renew it when it is ours already.

        Returns:
            True when this process leads.
        """
        runtime = self._store.runtime
        now = clock.monotonic_micros()
        with self._store.status.read() as cur:
            held = self._held(cur)
        if held is not None:
            term, slot, start, taken = held
            heard_of, heard = runtime.heartbeat_read(runtime.LEADER)
            renewed = max(taken, heard) if heard_of == term else taken
            if term == self.term:
                if self.beat():
                    return True
            elif self._free(slot, start, renewed, now):
                self.unwatched = max(now - renewed, 0)
            else:
                self.term = None
                return False
        with self._store.status.write() as cur:
            if self._held(cur) != held:
                self.term = None
                return False
            term = 1 if held is None else held[0] + (held[0] != self.term)
            cur.execute(
                "INSERT OR REPLACE INTO lease (id, term, owner_slot, owner_start, renewed) "
                "VALUES (1, ?, ?, ?, ?)",
                (term, runtime.slot, runtime.slot_start, now),
            )
            runtime.heartbeat_register(runtime.LEADER, term, now)
        self.term = term
        return True

    def confirm(self, cur: apsw.Cursor) -> int:
        """The term, when this process still leads. Inside the write that relies on it.

        Raises:
            LeaseLostError: it does not.
        """
        held = self._held(cur)
        if self.term is None or held is None or held[0] != self.term:
            self.term = None
            raise LeaseLostError
        return self.term

    def release(self) -> None:
        if self.term is None:
            return
        with self._store.status.write() as cur:
            cur.execute("UPDATE lease SET owner_slot = NULL WHERE term = ?", (self.term,))
        self.term = None

    def _free(self, slot: int | None, start: int, renewed: int, now: int) -> bool:
        alive = slot is not None and self._store.runtime.slot_alive(slot, start)
        return not alive or now - renewed > LEASE_TIME

    @staticmethod
    def _held(cur: apsw.Cursor) -> tuple[int, int | None, int, int] | None:
        found = cur.execute("SELECT term, owner_slot, owner_start, renewed FROM lease").fetchone()
        return None if found is None else found
