"""The settings of a read or write of a table in batches; topics and streams have their own.

All are checked while Spark plans. `settings_topics` has the reads of topics and of changes,
`settings_sinks` the writes into topics and the sinks of streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from txnkv.client import Client, connect
from txnkv.coordinator import KEEPALIVE_TIME, Timestamp
from txnkv.options import Operation
from txnkv.spark import settings_options as options_
from txnkv.tables import DELETES, UPDATES, require_operation


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of the store, and how to connect to it.

    Attributes:
        path: absolute.
        keepalive_time: seconds without heartbeat until a transaction that is the job's own is
            aborted.
        history: seconds that this process keeps of the past; None for the default.
    """

    path: str
    keepalive_time: float = KEEPALIVE_TIME
    history: float | None = None

    def connect(self) -> Client:
        """A client of the store.

        Raises:
            StoreNotFoundError: there is no store at `path`.
        """
        if self.history is None:
            return connect(self.path, create=False, keepalive_time=self.keepalive_time)
        return connect(
            self.path,
            create=False,
            history=self.history,
            keepalive_time=self.keepalive_time,
        )


@dataclass(frozen=True, kw_only=True)
class Settings(Place):
    """Settings of a read or write of a table in batches.

    Attributes:
        columns: the projection of a read; None for all.
        snapshot: what a read sees; None for the latest.
        push_filters: whether each data frame of the read serves one query alone; see `pushdown`.
        overwrite: the rows that are there give way to those that are written.
        timeout: seconds for a write in a transaction of its own, or None.
    """

    table: str
    token: str | None = None
    columns: tuple[str, ...] | None = None
    snapshot: Timestamp | datetime | None = None
    push_filters: bool = False
    operation: Operation = "insert"
    overwrite: bool = False
    timeout: float | None = None

    @classmethod
    def of_read(cls, options: Mapping[str, str]) -> Settings:
        """The settings of a read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory.
        """
        given = options_.named(options, options_.READ_TABLE, "a read of a table")
        path, table = options_.place(given, "table")
        if "token" in given and "snapshot" in given:
            raise ValueError(
                "options token and snapshot exclude each other: a read with a token sees its "
                "transaction's snapshot"
            )
        snapshot = given.get("snapshot")
        return cls(
            path=path,
            table=table,
            token=given.get("token"),
            columns=options_.columns(given),
            snapshot=None if snapshot is None else options_.time("snapshot", snapshot),
            push_filters=options_.flag(given, "pushFilters", False),
        )

    @classmethod
    def of_write(cls, options: Mapping[str, str], *, overwrite: bool = False) -> Settings:
        """The settings of a write, in mode append or overwrite.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory.
        """
        given = options_.named(options, options_.WRITE_TABLE, "a write into a table")
        path, table = options_.place(given, "table")
        operation = require_operation(given.get("operation", "insert"))
        require_rows_left(operation, overwrite)
        refuse_times_of_others(given)
        return cls(
            path=path,
            table=table,
            token=given.get("token"),
            operation=operation,
            overwrite=overwrite,
            timeout=options_.seconds(given, "timeout"),
            keepalive_time=options_.seconds(given, "keepaliveTime") or KEEPALIVE_TIME,
        )


def require_rows_left(operation: str, overwrite: bool) -> None:
    """Refuse to replace all rows by an operation that needs rows.

    Raises:
        ValueError: the operation updates or deletes.
    """
    if overwrite and operation in UPDATES | DELETES:
        raise ValueError(
            f"mode overwrite leaves no rows to {operation}: take mode append for it, or "
            "operation insert, insert_ignore or upsert"
        )


def refuse_times_of_others(given: Mapping[str, str]) -> None:
    """Refuse the times of an own transaction for a write that joins another.

    Raises:
        ValueError: there is a token and one of them.
    """
    if "token" in given and not {"timeout", "keepaliveTime"}.isdisjoint(given):
        raise ValueError(
            "options timeout and keepaliveTime are for a write in a transaction of its own: "
            "with a token, give them to new_transaction and connect"
        )
