"""What a reader sees: a snapshot, and inside a transaction also its own staged rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from txnkv.coordinator import status_table
from txnkv.coordinator.ids import Timestamp
from txnkv.tables import manifest
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.tablet import Tablet

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine


@dataclass(frozen=True)
class ReadView:
    """A snapshot and a transaction's own writes.

    Attributes:
        snapshot: everything that committed at or below it is seen.
        txn_id: the transaction whose staged rows are seen too, or None.
    """

    snapshot: Timestamp
    txn_id: int | None = None

    def row_sets(self, engine: TableEngine, tablet: Tablet) -> list[RowSetInfo]:
        """The row sets of a tablet that this view sees, oldest first.

        Raises:
            TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN.
        """
        seen = tablet.visible(self.snapshot)
        if self.txn_id is None:
            return seen
        with engine.store.status.read() as cur:
            # Aborted by another process, it would read as if it had written nothing.
            status_table.get_open(cur, self.txn_id, "read")
            return seen + manifest.staged(cur, self.txn_id, tablet.id)
