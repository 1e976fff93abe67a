"""Tables and topics of a store: made, found, listed and dropped, outside of transactions."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from txnkv.client.table import Table
from txnkv.client.topic import Topic
from txnkv.client.typed_values import ValueSchema, declared
from txnkv.coordinator.loss import Loss
from txnkv.errors import (
    TableExistsError,
    TableNotFoundError,
    TopicExistsError,
    TopicNotFoundError,
)
from txnkv.options import Buffer, Compression
from txnkv.storage.shield import shielded
from txnkv.tables.accepting import accept_loss as accept_tablet
from txnkv.tables.catalog import TableInfo
from txnkv.tables.partitioning import PartitionBy, Partitioning
from txnkv.tables.row_writer import RowWriter
from txnkv.tables.schema import Schema
from txnkv.topics.accepting import accept_loss as accept_log
from txnkv.topics.catalog import TopicInfo, TopicOptions

if TYPE_CHECKING:
    from txnkv.client.client import Client
    from txnkv.instance import Instance


def _part(part: str) -> tuple[str, str, int]:
    """The kind, if it is said, the name and the number."""
    kind, colon, rest = part.partition(":")
    if not colon or kind not in ("table", "topic"):
        kind, rest = "", part
    name, _, number = rest.rpartition("/")
    if not name or not number.isdigit():
        raise ValueError(f"{part!r} is no part: say a name and a number, as in 'orders/0'")
    return kind, name, int(number)


class CatalogOperations:
    """The part of a client that is about the catalog."""

    instance: Instance

    @abstractmethod
    def require_open(self) -> None:
        """Refuse a closed client."""

    @abstractmethod
    def require_writable(self) -> None:
        """Refuse to write where this client was opened to read only."""

    @abstractmethod
    def _itself(self) -> Client: ...

    @shielded
    def accept_loss(self, part: str, *, dry_run: bool = False) -> Loss:
        """Give up what a damaged tablet or partition has lost; what is left of it works again.

        Lost offsets of a topic are passed over, and never given again. Of a table whole row sets
        go, where anything of them is damaged or gone; rows that they had replaced do not come back.
        Its undecided transactions are aborted. It cannot be taken back: restore its files first, if
        there is a backup.

        Args:
            part: a name and the number of a tablet or partition, from 0: "orders/0"; where there
                are both, "table:orders/0" or "topic:orders/0".
            dry_run: only say what would be lost.

        Returns:
            What was lost; true if that is anything.

        Raises:
            TableNotFoundError, TopicNotFoundError: there is no such part.
            UnavailableError: another process has its files open.
        """
        self.require_writable()
        kind, name, number = _part(part)
        table = self.instance.engine.find(name) if kind != "topic" else None
        topic = self.instance.topics.find(name) if kind != "table" else None
        if table is not None and topic is not None:
            raise ValueError(f"{part!r} is a table and a topic: say table:{part} or topic:{part}")
        if topic is not None and number < len(topic.partitions):
            partition = self.instance.topics.partitions(topic)[number]
            loss = accept_log(self.instance.topics, partition, really=not dry_run)
        elif table is not None and number < len(table.tablets):
            tablet = self.instance.engine.tablets(table)[number]
            return accept_tablet(self.instance.engine, tablet, really=not dry_run)
        elif topic is not None or kind == "topic":
            raise TopicNotFoundError(f"no topic has the part {part!r}: see `txnkv check`")
        else:
            raise TableNotFoundError(f"no table or topic has the part {part!r}: see `txnkv check`")
        if not dry_run:
            self.instance.engine.flush()
        return loss

    # -- tables ------------------------------------------------------------------------

    @shielded
    def create_table(
        self,
        name: str,
        schema: Schema,
        partition_by: PartitionBy = None,
        exists_ok: bool = False,
    ) -> Table:
        """Make a table. Takes effect at once, outside of transactions.

        Args:
            name: a new one.
            schema: columns and primary key.
            partition_by: `hash_partition`, `range_partition`, or a list of them; by default
                the table is one tablet.
            exists_ok: return the table of this name when there is one with this schema and
                partitioning.

        Raises:
            TableExistsError: the name is taken (with exists_ok: by a table that is different; the
                message names how).
            SchemaError: the partitioning does not fit the schema.
        """
        self.require_writable()
        if not isinstance(name, str) or not name:
            raise ValueError(f"a table's name is a non-empty string, not {name!r}")
        if not isinstance(schema, Schema):
            raise TypeError(f"schema is a txnkv.Schema, not {type(schema).__name__}")
        partitioning = Partitioning.of(schema, partition_by)
        engine = self.instance.engine
        while True:
            try:
                return Table(self._itself(), engine.create(name, schema, partitioning))
            except TableExistsError:
                if not exists_ok:
                    raise
            found = engine.find(name)
            if found is not None:  # else it was dropped meanwhile
                found.require_alike(schema, partitioning)
                return Table(self._itself(), found)

    def table(self, name: str) -> Table:
        """The table of this name.

        Raises:
            TableNotFoundError: there is none.
        """
        self.require_open()
        return Table(self._itself(), self.instance.engine.get(name))

    @shielded
    def tables(self) -> list[str]:
        """The names of all tables, sorted."""
        self.require_open()
        return self.instance.engine.names()

    @shielded
    def drop_table(self, name: str | Table, missing_ok: bool = False, keep: float = 0.0) -> None:
        """Drop a table at once; open transactions that touched it are aborted.

        Args:
            name: or a handle of it.
            missing_ok: do nothing when there is none.
            keep: seconds for which `recall_table` brings it back with all its rows; its name
                is free meanwhile, its space is not.

        Raises:
            TableNotFoundError: there is none, and `missing_ok` is false.
        """
        if keep < 0:
            raise ValueError(f"keep is seconds, at least 0, not {keep!r}")
        self.require_writable()
        text = name if isinstance(name, str) else name.name
        if not self.instance.engine.drop(text, keep) and not missing_ok:
            raise TableNotFoundError(f"there is no table {text!r} to drop")

    def recall_table(self, name: str) -> Table:
        """Bring back a table that was dropped with `keep`, until its time is over.

        Handles of it work again; of several kept ones of this name it is the one made last.

        Raises:
            TableNotFoundError: none of this name is kept, or no longer.
            TableExistsError: the name was given to another table.
        """
        self.require_writable()
        return Table(self._itself(), self.instance.engine.recall(name))

    def resolve(self, table: str | Table) -> Table:
        """A table handle of a name or a handle."""
        self.require_open()
        return table if isinstance(table, Table) else self.table(table)

    def table_info(self, table: str | Table) -> TableInfo:
        """The catalog entry of a name or a handle, of a table that is not dropped."""
        self.require_open()
        if isinstance(table, str):
            return self.instance.engine.get(table)
        if not isinstance(table, Table):
            raise TypeError(f"a table is a name or a Table, not {type(table).__name__}")
        self.instance.engine.require_live(table.info)
        return table.info

    def writer(self, table: str | Table) -> RowWriter:
        """Return the row writer of a table that is not dropped."""
        return self.instance.engine.row_writer(self.table_info(table))

    # -- topics ------------------------------------------------------------------------

    @shielded
    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        buffer: Buffer = "marker",
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
        compression: Compression | None = None,
        exists_ok: bool = False,
        value_schema: ValueSchema | None = None,
        retain_unacknowledged: bool = False,
    ) -> Topic:
        """Make a topic. Takes effect at once, outside of transactions.

        Args:
            name: a new one.
            partitions: how many; messages of one key stay in one of them, in their order.
            buffer: where messages of open transactions wait. "marker": in the log itself, so
                that readers see them where they were sent, and wait behind an open transaction;
                "sidecar": beside it, so that readers see transactions in the order of their
                commits and nobody waits.
            retention_seconds: messages older than this may go; None keeps them.
            retention_bytes: of a partition, what is older than so many bytes may go.
            compression: None, "lz4" or "zstd".
            exists_ok: return the topic of this name when there is one that was made alike.
            value_schema: columns of which each value is a row, as those of a `Schema`
                ({"id": "int64", "note": "string?"}) or a `pyarrow.Schema`; None: bytes. No column
                has the name of what messages have beside: key, headers, timestamp, partition,
                offset, txn_id. It stays as it is.
            retain_unacknowledged: retention keeps what a subscription has not acknowledged, however
                long that takes; else it takes such messages too, and warns.

        Raises:
            TopicExistsError: the name is taken (with exists_ok: by a topic that is different; the
                message names how).
            SchemaError: a column of values has a type or name that it cannot have.
            ValueError: an argument makes no sense.
        """
        self.require_writable()
        if not isinstance(name, str) or not name:
            raise ValueError(f"a topic's name is a non-empty string, not {name!r}")
        options = TopicOptions(
            compression=compression,
            retention_seconds=retention_seconds,
            retention_bytes=retention_bytes,
            value_schema=declared(value_schema),
            retain_unacknowledged=retain_unacknowledged,
        )
        topics = self.instance.topics
        while True:
            try:
                return Topic(self._itself(), topics.create(name, partitions, buffer, options))
            except TopicExistsError:
                if not exists_ok:
                    raise
            found = topics.find(name)
            if found is not None:  # else it was dropped meanwhile
                found.require_alike(partitions, buffer, options)
                return Topic(self._itself(), found)

    def topic(self, name: str) -> Topic:
        """The topic of this name.

        Raises:
            TopicNotFoundError: there is none.
        """
        self.require_open()
        return Topic(self._itself(), self.instance.topics.get(name))

    @shielded
    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        self.require_open()
        return self.instance.topics.names()

    @shielded
    def drop_topic(self, name: str | Topic, missing_ok: bool = False) -> None:
        """Drop a topic at once; open transactions that touched it are aborted.

        Raises:
            TopicNotFoundError: there is none, and `missing_ok` is false.
        """
        self.require_writable()
        text = name if isinstance(name, str) else name.name
        if not self.instance.topics.drop(text) and not missing_ok:
            raise TopicNotFoundError(f"there is no topic {text!r} to drop")

    def topic_info(self, topic: str | Topic) -> TopicInfo:
        """The catalog entry of a name or a handle, of a topic that is not dropped."""
        self.require_open()
        if isinstance(topic, str):
            return self.instance.topics.get(topic)
        if not isinstance(topic, Topic):
            raise TypeError(f"a topic is a name or a Topic, not {type(topic).__name__}")
        self.instance.topics.require_live(topic.info)
        return topic.info
