"""The options of a read or write, checked while Spark plans it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from txnkv.client import Client, connect
from txnkv.coordinator.coordinator import KEEPALIVE_TIME
from txnkv.coordinator.ids import Timestamp
from txnkv.errors import NotSupportedError
from txnkv.tables.operations import DELETES, UPDATES, require_operation

_READ: Final = ("path", "table", "token", "columns", "snapshot", "pushFilters")
_WRITE: Final = ("path", "table", "token", "operation", "timeout", "keepaliveTime")
_LATER: Final = (
    "topic",
    "startingOffsets",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "changes",
    "order",
    "appId",
    "failOnDataLoss",
)


@dataclass(frozen=True)
class Settings:
    """Checked options.

    Attributes:
        path: absolute.
        columns: the projection of a read; None for all.
        snapshot: what a read sees; None for the latest.
        push_filters: whether each data frame of the read serves one query alone; see `pushdown`.
        overwrite: the rows that are there give way to those that are written.
        timeout: seconds for a write in a transaction of its own, or None.
        keepalive_time: seconds without heartbeat until that transaction is aborted.
    """

    path: str
    table: str
    token: str | None = None
    columns: tuple[str, ...] | None = None
    snapshot: Timestamp | datetime | None = None
    push_filters: bool = False
    operation: str = "insert"
    overwrite: bool = False
    timeout: float | None = None
    keepalive_time: float = KEEPALIVE_TIME

    @classmethod
    def of_read(cls, options: Mapping[str, str]) -> Settings:
        """The settings of a read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: an option belongs to what this version does not have.
        """
        given = _named(options, _READ, "read")
        if "token" in given and "snapshot" in given:
            raise ValueError(
                "options token and snapshot exclude each other: a read with a token sees its "
                "transaction's snapshot"
            )
        columns = given.get("columns")
        snapshot = given.get("snapshot")
        return cls(
            *_place(given),
            columns=None if columns is None else _columns(columns),
            snapshot=None if snapshot is None else _snapshot(snapshot),
            push_filters=_flag("pushFilters", given.get("pushFilters", "false")),
        )

    @classmethod
    def of_write(cls, options: Mapping[str, str], *, overwrite: bool = False) -> Settings:
        """The settings of a write, in mode append or overwrite.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: an option belongs to what this version does not have.
        """
        given = _named(options, _WRITE, "write")
        operation = given.get("operation", "insert")
        require_operation(operation)
        if overwrite and operation in UPDATES + DELETES:
            raise ValueError(
                f"mode overwrite leaves no rows to {operation}: take mode append for it, or "
                "operation insert, insert_ignore or upsert"
            )
        if "token" in given and not {"timeout", "keepaliveTime"}.isdisjoint(given):
            raise ValueError(
                "options timeout and keepaliveTime are for a write in a transaction of its own: "
                "with a token, give them to new_transaction and connect"
            )
        timeout = given.get("timeout")
        return cls(
            *_place(given),
            operation=operation,
            overwrite=overwrite,
            timeout=None if timeout is None else _seconds("timeout", timeout),
            keepalive_time=_seconds("keepaliveTime", given.get("keepaliveTime", KEEPALIVE_TIME)),
        )

    def connect(self) -> Client:
        """A client of the store.

        Raises:
            StoreNotFoundError: there is no store at `path`.
        """
        return connect(self.path, create=False, keepalive_time=self.keepalive_time)


def _named(options: Mapping[str, str], known: tuple[str, ...], what: str) -> dict[str, str]:
    """The options under their own names; Spark hands them in small letters."""
    names = {name.lower(): name for name in (*known, *_LATER)}
    given = {}
    for key, value in options.items():
        name = names.get(key.lower())
        if name is None:
            raise ValueError(f"a {what} has no option {key!r}; its options are {', '.join(known)}")
        if name in _LATER:
            raise NotSupportedError(
                f"option {name} is of topics and streams, which this version does not have; "
                f"the options of a {what} are {', '.join(known)}"
            )
        given[name] = value
    return given


def _place(given: Mapping[str, str]) -> tuple[str, str, str | None]:
    """Path, table and token."""
    for name in ("path", "table"):
        if not given.get(name):
            raise ValueError(f"option {name} is missing: say .option({name!r}, ...)")
    path = given["path"]
    if "://" in path:
        raise NotSupportedError(
            f"path {path!r}: this version opens stores on this machine alone; give a directory"
        )
    return os.path.abspath(path), given["table"], given.get("token")


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"columns is names with commas between, as 'id,total', not {text!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"columns names a column twice: {text!r}")
    return names


def _snapshot(text: str) -> Timestamp | datetime:
    if text.strip().isdecimal():
        return Timestamp(int(text))
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"snapshot is str() of a txnkv.Timestamp, or an ISO 8601 time with its zone, "
            f"not {text!r}"
        ) from None


def _seconds(name: str, text: str | float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is seconds above 0, not {text!r}")
    return value


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{name} is 'true' or 'false', not {text!r}")
    return text.lower() == "true"
