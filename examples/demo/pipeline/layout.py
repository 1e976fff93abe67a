"""The tables and topics of the pipeline, made by whichever program comes first."""

from __future__ import annotations

from typing import Final

import txnkv

LINES: Final = "lines"
ALERTS: Final = "alerts"
FILES: Final = "files"
COUNTS: Final = "counts"
MAILS: Final = "mails"
COUNTING: Final = "counting"
MAILER: Final = "mailer"
PARTITIONS: Final = 2

THRESHOLDS: Final = tuple(10**power for power in range(2, 9))
"""A word that comes to one of these totals is worth an alert."""


def make(client: txnkv.Client) -> None:
    """Make what is missing."""
    _table(client, FILES, {"name": "string", "inode": "int64", "position": "int64"}, ["name"])
    _table(client, COUNTS, {"word": "string", "total": "int64"}, ["word"])
    _table(client, MAILS, {"word": "string", "total": "int64"}, ["word", "total"])
    client.create_topic(LINES, partitions=PARTITIONS, exists_ok=True)
    client.create_topic(ALERTS, partitions=1, exists_ok=True)


def _table(client: txnkv.Client, name: str, columns: dict[str, str], key: list[str]) -> None:
    client.create_table(name, txnkv.Schema(columns, primary_key=key), exists_ok=True)
