"""The settings of each kind of read and write, from its options.

Each is checked while Spark plans.

               spark.read            readStream             df.write               writeStream
    table      Settings.of_read      -                      Settings.of_write      StreamWrite
    changes    -                     ChangesRead            -                      -
    topic      TopicRead.of_batch    TopicRead.of_stream    TopicWrite             StreamWrite
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from txnkv.client import Client, Planning, inode_of
from txnkv.coordinator import KEEPALIVE_TIME, Timestamp
from txnkv.errors import NotSupportedError, StoreNotFoundError
from txnkv.remote import Credentials, connect, is_address
from txnkv.spark import option_table
from txnkv.spark.option_table import Kind
from txnkv.storage import boot_id
from txnkv.tables import DELETES, UPDATES, Operation
from txnkv.topics import READ_BYTES, Position, TopicReading
from txnkv.transaction import keep_longer


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """The place of the store, and how to connect to it.

    Attributes:
        path: absolute, or the address of a server.
        keepalive_time: seconds without heartbeat until a transaction that is the job's own is
            aborted.
        history: seconds that this process keeps of the past; None for the default.
        credentials: for a server; None for those of the environment, if any.
        direct: open the folder of a server's store, where that is to be had.
    """

    path: str
    keepalive_time: float = KEEPALIVE_TIME
    history: float | None = None
    credentials: Credentials | None = field(default=None, repr=False)
    direct: bool = True

    def connect(self) -> Client:
        """A client of the store.

        Raises:
            StoreNotFoundError: there is no store at `path`.
            UnavailableError: no server answers there.
            AuthenticationError: it refused the credentials.
        """
        if not is_address(self.path):
            return self._open(self.path)
        given = self.credentials
        if given is None and CREDENTIALS in os.environ:
            given = option_table.value_of(
                f"variable {CREDENTIALS}", option_table.credentials, os.environ[CREDENTIALS]
            )
        found = connect(
            self.path, history=self.history, keepalive_time=self.keepalive_time, credentials=given
        )
        folder = _folder_here(Planning.of(found)) if self.direct else None
        if folder is None:
            return found
        found.close()
        opened = self._open(folder)
        opened.addresses = (self.path,)  # where others find it
        return opened

    def _open(self, path: str) -> Client:
        """A client of a folder. What has it open in this process, as another read of Spark's, keeps
        as much of the past from now on.
        """
        history = self.history
        if history is not None and keep_longer(path, history):
            history = None
        try:
            return connect(path, create=False, history=history, keepalive_time=self.keepalive_time)
        except StoreNotFoundError as error:
            raise StoreNotFoundError(_for_spark(str(error))) from None


def _for_spark(text: str) -> str:
    """Advice for who has no argument create, and may have given a relative path."""
    found, advised, _ = text.partition(". Check the path")
    if not advised:
        return text
    return (
        f"{found}. Check option path: a relative one counts from where the Spark session was "
        "begun. Spark makes no store: txnkv.connect(path) does, or txnkv init"
    )


CREDENTIALS: Final = "TXNKV_CREDENTIALS"
"""The variable of the environment with what option `credentials` says."""


def _folder_here(there: Planning) -> str | None:
    """The folder of a server's store, where this is the server's machine and may write to it.

    A folder of another machine, over a network file system, is none: two machines do not share
    the memory by which the processes of a store agree.
    """
    if there.boot != boot_id() or not os.access(there.folder, os.R_OK | os.W_OK | os.X_OK):
        return None
    try:
        if inode_of(there.folder) != there.inode:  # of another container, a copy of it perhaps
            return None
        found = json.loads((Path(there.folder) / "FORMAT").read_text())
    except (OSError, ValueError):
        return None
    return there.folder if found.get("store_id") == there.store_id else None


@dataclass(frozen=True, kw_only=True)
class Settings(StorePlace):
    """Settings of a read or write of a table in batches.

    Attributes:
        columns: the projection of a read; None for all.
        snapshot: what a read sees; None for the latest.
        push_filters: whether each data frame of the read serves one query alone; see `reading`.
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
            NotSupportedError: the path is no directory or address.
        """
        given = option_table.parsed(options, "a read of a table", Kind.READ_TABLE)
        if "token" in given and "snapshot" in given:
            raise ValueError(
                "options token and snapshot exclude each other: a read with a token sees its "
                "transaction's snapshot"
            )
        return cls(**given)

    @classmethod
    def of_write(cls, options: Mapping[str, str], *, overwrite: bool = False) -> Settings:
        """The settings of a write, in mode append or overwrite.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory or address.
        """
        given = option_table.parsed(options, "a write into a table", Kind.WRITE_TABLE)
        made = cls(overwrite=overwrite, **given)
        require_rows_left(made.operation, overwrite)
        refuse_times_of_others(given)
        return made


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


def refuse_times_of_others(given: Mapping[str, Any]) -> None:
    """Refuse the times of an own transaction for a write that joins another.

    Raises:
        ValueError: there is a token and one of them.
    """
    if "token" in given and not {"timeout", "keepalive_time"}.isdisjoint(given):
        raise ValueError(
            "options timeout and keepaliveTime are for a write in a transaction of its own: "
            "with a token, give them to new_transaction and connect"
        )


TABLE: Final = "table"
TOPIC: Final = "topic"
CHANGES: Final = "changes"


def names_topic(options: Mapping[str, str]) -> bool:
    """Tell whether a topic is read or written, rather than a table.

    Raises:
        ValueError: options table and topic are both there, or neither.
    """
    found = option_table.given(options)
    if "topic" in found and "table" in found:
        raise ValueError("options table and topic exclude each other: give one of them")
    if "topic" not in found and "table" not in found:
        hint = "" if found else "; those of CREATE TABLE Spark keeps back: take a temporary view"
        raise ValueError(f"option table or topic is missing: say .option('table', ...){hint}")
    return "topic" in found


def what_is_read(options: Mapping[str, str]) -> str:
    """TABLE, TOPIC or CHANGES.

    Raises:
        ValueError: options table and topic are both there, or neither; changes is no flag.
    """
    if names_topic(options):
        return TOPIC
    changes = option_table.given(options).get("changes", "false")
    streams = option_table.value_of("option changes", option_table.flag, changes)
    return CHANGES if streams else TABLE


@dataclass(frozen=True, kw_only=True)
class TopicRead(StorePlace):
    """Settings of a read of a topic, batch or stream. The read sees committed messages.

    Attributes:
        columns: the projection; None for all.
        order: "offset", or "commit": whole transactions, as they were committed.
        starting_offsets: where a batch, or a new query, begins.
        ending_offsets: where a batch ends.
        max_offsets_per_trigger: at most about so many a micro batch; None for all there are.
        max_bytes: of messages in memory that a task holds at a time, about.
        fail_on_data_loss: whether messages that are gone are an error.
    """

    topic: str
    columns: tuple[str, ...] | None = None
    order: str = "offset"
    starting_offsets: Position = "earliest"
    ending_offsets: Position = "latest"
    max_offsets_per_trigger: int | None = None
    max_bytes: int = READ_BYTES
    fail_on_data_loss: bool = True

    @property
    def reading(self) -> TopicReading:
        """The read as its planner is told of it."""
        return TopicReading(
            self.order, self.starting_offsets, self.ending_offsets, self.fail_on_data_loss
        )

    @classmethod
    def of_schema(cls, options: Mapping[str, str]) -> TopicRead:
        """The settings of a read of which it is not known whether it is a batch or a stream.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory or address, or there is a token.
        """
        return cls._of(options, "a read of a topic", Kind.READ_TOPIC, Kind.STREAM_TOPIC)

    @classmethod
    def of_batch(cls, options: Mapping[str, str]) -> TopicRead:
        """The settings of a batch read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory or address, or there is a token.
        """
        made = cls._of(options, "a batch read of a topic", Kind.READ_TOPIC)
        if made.starting_offsets == "latest":
            raise ValueError("a batch from startingOffsets 'latest' on reads nothing: leave it out")
        return made

    @classmethod
    def of_stream(cls, options: Mapping[str, str]) -> TopicRead:
        """The settings of a streaming read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory or address, or there is a token.
        """
        return cls._of(options, "a streaming read of a topic", Kind.STREAM_TOPIC)

    @classmethod
    def _of(cls, options: Mapping[str, str], what: str, *kinds: Kind) -> TopicRead:
        _refuse_token(options, what)
        return cls(**option_table.parsed(options, what, *kinds))


@dataclass(frozen=True, kw_only=True)
class ChangesRead(StorePlace):
    """Settings of a stream of a table's changes.

    Attributes:
        columns: the projection of the table's columns and `_op`, `_commit_timestamp`; None for all.
        starting_offsets: "earliest": all rows, then changes; "latest"; or changes after a time.
    """

    table: str
    columns: tuple[str, ...] | None = None
    starting_offsets: str | Timestamp | datetime = "earliest"

    @classmethod
    def of_stream(cls, options: Mapping[str, str]) -> ChangesRead:
        """The settings of a streaming read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory or address, or there is a token.
        """
        what = "a stream of changes"
        _refuse_token(options, what)
        given = option_table.parsed(
            options, what, Kind.STREAM_CHANGES, startingOffsets=option_table.change_position
        )
        given.pop("changes", None)
        return cls(**given)


def _refuse_token(options: Mapping[str, str], what: str) -> None:
    if "token" in option_table.given(options):
        raise NotSupportedError(
            f"{what} sees what is committed, and joins no transaction: leave out option token"
        )


@dataclass(frozen=True, kw_only=True)
class TopicWrite(StorePlace):
    """Settings of a batch write into a topic.

    Attributes:
        timeout: seconds for a write in a transaction of its own, or None.
    """

    topic: str
    token: str | None = None
    timeout: float | None = None

    @classmethod
    def of_batch(cls, options: Mapping[str, str], *, overwrite: bool = False) -> TopicWrite:
        """The settings of a write in mode append.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense, or so does the mode.
            NotSupportedError: the path is no directory or address.
        """
        given = option_table.parsed(options, "a write into a topic", Kind.WRITE_TOPIC)
        _refuse_overwrite(given["topic"], overwrite)
        refuse_times_of_others(given)
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class StreamWrite(StorePlace):
    """Settings of the sink of a stream: a table or a topic. Each micro batch is one transaction.

    Attributes:
        table, topic: one of them is None.
        operation: of a table: what is done with the rows.
        operation_column: of a table: the column that says it for each row; or None.
        app_id: the application that the batches count for; None for the query's id.
        checkpoint: option checkpointLocation, where it was given as one; absolute.
        query: the query's name, if it has one.
        overwrite: each batch replaces the rows (output mode complete).
        timeout: seconds for the transaction of a micro batch, or None.
    """

    table: str | None = None
    topic: str | None = None
    operation: Operation = "insert"
    operation_column: str | None = None
    app_id: str | None = None
    checkpoint: str | None = None
    query: str | None = None
    overwrite: bool = False
    timeout: float | None = None

    @classmethod
    def of_stream(cls, options: Mapping[str, str], *, overwrite: bool = False) -> StreamWrite:
        """The settings of a sink; `overwrite` in output mode complete.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense, or so does the mode.
            NotSupportedError: the path is no directory or address.
        """
        kind = "topic" if names_topic(options) else "table"
        found = option_table.given(options)
        of_spark = {name: found.pop(name, None) for name in option_table.OF_SPARK}
        sink = Kind.SINK_TOPIC if kind == "topic" else Kind.SINK_TABLE
        given = option_table.parsed(found, f"a stream into a {kind}", sink)
        checkpoint = option_table.location(of_spark["checkpointLocation"])
        query = of_spark["queryName"]
        made = cls(overwrite=overwrite, checkpoint=checkpoint, query=query, **given)
        if made.topic is not None:
            _refuse_overwrite(made.topic, overwrite)
        require_rows_left(made.operation, overwrite)
        if "operation" in given and "operation_column" in given:
            raise ValueError("options operation and operationColumn exclude each other")
        return made


def _refuse_overwrite(topic: str, overwrite: bool) -> None:
    if overwrite:
        raise ValueError(
            f"a topic is only ever added to, and cannot be overwritten: write into {topic!r} in "
            "mode append; or, for the whole result of each batch, into a table"
        )
