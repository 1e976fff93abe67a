"""The position of a stream of changes, as Spark writes it into its checkpoint.

    {"store": "4f...", "table": "orders", "id": 3, "timestamp": 890663553417482240, "since": 0}

All that committed up to `timestamp` is read. `since` is where the batch begins that ends here:
Spark writes no start of a query's first batch, and asks for another when it runs that batch
again. It may also lie above the end of the batch before, where nothing changed in between. The
batch that begins at 0 is the first load: all rows there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from txnkv.coordinator import Timestamp

BEGINNING: Final = Timestamp(0)
"""Before all rows."""


@dataclass(frozen=True)
class ChangesOffset:
    """A point in the life of a table.

    Attributes:
        store: the store's id.
        table, id: its name, and the id that tells it from others that had its name.
        timestamp: what committed up to then is read.
        since: in the end of a batch: where that batch begins.
    """

    store: str
    table: str
    id: int
    timestamp: Timestamp
    since: Timestamp | None = None

    def json(self) -> dict[str, Any]:
        """Return this point as Spark keeps it."""
        made: dict[str, Any] = {"store": self.store, "table": self.table, "id": self.id}
        made["timestamp"] = int(self.timestamp)
        if self.since is not None:
            made["since"] = int(self.since)
        return made

    @classmethod
    def parse(cls, given: Mapping[str, Any], table: str) -> ChangesOffset:
        """Return the point that `json` gave, for a query that reads the changes of this table.

        Raises:
            ValueError: `given` is of another table, or no such point at all.
        """
        try:
            since = given.get("since")
            made = cls(
                given["store"],
                given["table"],
                int(given["id"]),
                Timestamp(given["timestamp"]),
                None if since is None else Timestamp(since),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"the checkpoint has {given!r}, which is no place in the changes of a table: it "
                "is of another source. Take a checkpoint of this query's own"
            ) from None
        if made.table != table:
            raise ValueError(
                f"the checkpoint is of the changes of table {made.table!r}, the query reads those "
                f"of {table!r}: take that table, or a new checkpoint"
            )
        return made
