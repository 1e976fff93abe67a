"""Names for transactions: what is done again and again, one transaction after the other, finds by
its name the one that it began last, also after all of its processes died.

    driver    begins 17 with a job, and names it:  "stream s" -> 17
              commits 17, begins 18, names it:     "stream s" -> 18
              dies
    driver'   begins 19 and names it:              "stream s" -> 19, and is told of 18: nobody
                                                   else goes on with that one, so it aborts it

A name stands until it is given anew, or its transaction is forgotten (`history` after its end).
"""

from __future__ import annotations

from typing import NamedTuple

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.status_table import TxnRow


class NamedRow(NamedTuple):
    """The transaction under a name, open or ended, and its job; "" where it has none."""

    row: TxnRow
    job_id: str


def find(cur: apsw.Cursor, name: str) -> NamedRow | None:
    """Return the transaction and job under a name; None when there is none."""
    found = cur.execute(
        "SELECT txn_id, job_id FROM named_transactions WHERE name = ?", (name,)
    ).fetchone()
    return None if found is None else NamedRow(status_table.get(cur, found[0]), found[1])


def replace(cur: apsw.Cursor, name: str, txn_id: int, job_id: str = "") -> NamedRow | None:
    """Give a stored transaction and its job a name. Answers what was under it."""
    before = find(cur, name)
    cur.execute(
        "INSERT OR REPLACE INTO named_transactions (name, txn_id, job_id) VALUES (?, ?, ?)",
        (name, txn_id, job_id),
    )
    return before
