"""The tokens by which other processes read parts of what changed in a table."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from txnkv.storage.shield import shielded
from txnkv.tables import diff_tokens
from txnkv.tables.diff_tokens import DiffParts
from txnkv.transaction.connection import Connection


@dataclass(frozen=True)
class DiffToken:
    """A part of a diff, to be opened by any process. Picklable.

    Attributes:
        parts: which keys, between which times.
    """

    parts: DiffParts

    @property
    def rows(self) -> int:
        """About how many changes it covers, at most."""
        return self.parts.rows

    @shielded
    def open(self, client: Connection) -> pa.RecordBatchReader:
        """Its changes, as `Table.diff` gives them.

        Raises:
            InvalidTokenError: the token is of another store.
            TableNotFoundError: the table was dropped since.
            HistoryExpiredError: nobody kept the history from its start on.
        """
        client.require_open()
        return diff_tokens.reopen(client.instance.engine, self.parts)
