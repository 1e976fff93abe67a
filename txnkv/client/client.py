"""The client: where everything begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar, Unpack

from txnkv.client import admin, group_members
from txnkv.client.admin import CheckReport, CompactReport, TxnInfo
from txnkv.client.attempts import Attempts, begin_transaction, run
from txnkv.client.backup import BackupReport, back_up
from txnkv.client.group_consumer import GroupConsumer, GroupOptions
from txnkv.client.indexes import Index, columns_of, create_index, drop_index
from txnkv.client.table import Snapshot, Table
from txnkv.client.topic import Topic
from txnkv.coordinator import (
    LOCK_TIMEOUT,
    Applied,
    Loss,
    Timestamp,
    TxnId,
    TxnState,
    applications,
    repair_clock,
)
from txnkv.errors import TableNotFoundError, TopicNotFoundError, require_number
from txnkv.metrics import MetricsSnapshot
from txnkv.storage import brief, shielded
from txnkv.tables import History, PartitionBy, Partitioning, Schema, TableInfo, seconds_of
from txnkv.topics import Buffer, Cleanup, Compression, TopicInfo, TopicOptions
from txnkv.transaction import (
    BUFFER_BYTES,
    DEADLINE,
    DEFAULTS,
    AnyTable,
    AnyTopic,
    Closing,
    Connection,
    FlushMode,
    Isolation,
    Locking,
    Retries,
    Session,
    Transaction,
    TransactionOptions,
    TxnContext,
    ValueSchema,
    commit_protocols,
    declared,
    ending_joined,
    evolved_values,
)
from txnkv.transaction import instance as instances

T = TypeVar("T")


class Client(Connection, Closing):
    """A connection to a store. Shared by threads; a context manager."""

    _elsewhere = "connect there too; a transaction crosses processes as txn.serialize()"

    def __repr__(self) -> str:
        kind = ", read only" if self.instance.read_only else ""
        return f"<Client of {self.path!r}{kind}{'' if self.is_open else ', closed'}>"

    @shielded
    def close(self) -> None:
        """Close, and its subscriptions, producers and members of groups. The last client of a store
        in this process closes the store, and waits for what `commit_async` began. Twice is fine.
        """
        with instances.closing_once(self) as first:
            if first:
                with ending_joined(self):
                    self.close_handles()
                    self.is_open = False
                    self.renew_sessions(closed=True)
                    instances.release(self.instance, self)

    # -- tables ------------------------------------------------------------------------

    @shielded
    def create_table(
        self,
        name: str,
        schema: Schema,
        partition_by: PartitionBy = None,
        exists_ok: bool = False,
        evolve: bool = False,
        history: History = None,
    ) -> Table:
        """Make a table. Takes effect at once, outside of transactions.

        Args:
            name: a new one.
            schema: columns and primary key.
            partition_by: `hash_partition`, `range_partition`, or a list of them; None: one tablet.
            exists_ok: return the table of this name when there is one that was made alike.
            history: seconds for which versions are kept, "unlimited", or None: as the store does.
            evolve: as exists_ok, and change it where that is safe: widen types, make columns
                nullable, set defaults, add columns that are last here, nullable or with a default.

        Raises:
            TableExistsError: the name is taken (with exists_ok, evolve: by a different table).
            SchemaError: the partitioning does not fit the schema.
        """
        self.require_writable()
        if not isinstance(name, str) or not name:
            raise ValueError(f"a table's name is a non-empty string, not {name!r}")
        if not isinstance(schema, Schema):
            given = "pyarrow." * (type(schema).__module__ == "pyarrow.lib") + type(schema).__name__
            raise TypeError(f"schema is a txnkv.Schema (see Schema.from_arrow), not {given}")
        made_of = name, schema, Partitioning.of(schema, partition_by), seconds_of(history)
        if not (exists_ok or evolve):
            return Table(self, self.instance.engine.create(*made_of))
        return Table(self, self.instance.engine.provide(*made_of, evolve=evolve))

    def table(self, name: AnyTable) -> Table:
        """The table of this name.

        Raises:
            TableNotFoundError: there is none.
        """
        return Table(self, self.table_info(name))

    @brief
    def tables(self) -> list[str]:
        """The names of all tables, sorted."""
        self.require_open()
        return self.instance.engine.names()

    @shielded
    def drop_table(self, name: AnyTable, missing_ok: bool = False, keep: float = 0.0) -> None:
        """Drop a table at once; open transactions that touched it are aborted.

        Args:
            name: or a handle of it.
            missing_ok: do nothing when there is none.
            keep: seconds for which `recall_table` brings it back with all its rows; its name
                is free meanwhile, its space is not.

        Raises:
            TableNotFoundError: there is none, and `missing_ok` is false.
        """
        require_number("keep", keep)
        if not 0 <= keep <= 1e9:
            raise ValueError(f"keep is seconds, 0 to 1e9, not {keep!r}")
        self.require_writable()
        given = name if isinstance(name, str) else self.info_of(name, TableInfo)
        if not self.instance.engine.drop(given, keep) and not missing_ok:
            raise TableNotFoundError(f"there is no table {getattr(given, 'name', given)!r} to drop")

    @shielded
    def rename_table(self, table: AnyTable, name: str) -> Table:
        """Give a table another name at once; handles of it go on to work, and so do readers.

        Transactions meet it as a table that was altered: see `Table.alter`.

        Raises:
            TableNotFoundError: there is none.
            TableExistsError: the name is taken.
            ValueError: the name is empty, or no text.
        """
        self.require_writable()
        if not isinstance(name, str) or not name:
            raise ValueError(f"a table's name is a non-empty string, not {name!r}")
        info = self.table_info(table)
        return Table(self, self.instance.engine.alter(info, lambda schema: schema, name))

    @shielded
    def recall_table(self, name: str) -> Table:
        """Bring back a table that was dropped with `keep`, until its time is over.

        Handles of it work again; of several kept ones of this name it is the one made last.

        Raises:
            TableNotFoundError: none of this name is kept, or no longer.
            TableExistsError: the name was given to another table.
        """
        self.require_writable()
        return Table(self, self.instance.engine.recall(name))

    @shielded
    def create_index(
        self,
        table: AnyTable,
        columns: str | Sequence[str],
        unique: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Index:
        """Make an index, and fill it, while others read and write; one that is there is left.

        Transactions that began before, and write into the table, get SchemaChangedError and are
        run again. Killed on the way it is written and not read, until this is called again.

        Args:
            table: also one with rows.
            columns: that rows are looked for by, in this order.
            unique: no two rows may have the same values, those with a null among them aside.
            progress: called with (rows that were looked through, rows in all).

        Raises:
            SchemaError: no index can be by these columns, or it is one, but not unique alike.
            RowErrors: two rows have the same values in a unique one; it was not made.
        """
        self.require_writable()
        info = self.table_info(table)
        return create_index(self, info, columns_of(columns), unique=unique, progress=progress)

    @shielded
    def drop_index(self, table: AnyTable, columns: str | Sequence[str]) -> None:
        """Drop the index by these columns at once; transactions meet it as `create_index`.

        Raises:
            SchemaError: there is none.
        """
        self.require_writable()
        drop_index(self, self.table_info(table), columns_of(columns))

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
        cleanup: Cleanup = "delete",
        tombstone_seconds: float = TopicOptions.tombstone_seconds,
        segment_bytes: int = TopicOptions.segment_bytes,
        segment_seconds: float = TopicOptions.segment_seconds,
        evolve: bool = False,
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
                offset, txn_id. A column may have a default: a `Column`. See `Topic.alter`.
            retain_unacknowledged: retention keeps what a subscription has not acknowledged, however
                long that takes; else it takes such messages too, and warns.
            cleanup: "compact": of the committed messages of a key the last one stays, the others go
                in a while; for buffer="marker". Retention takes what it takes with "delete".
            tombstone_seconds: so long a message with a key and no value stays when it is the last.
            segment_bytes, segment_seconds: the log is cut where a part of it has so many bytes, or
                messages of so many seconds; retention and compaction leave the last part alone.
            evolve: as exists_ok, and give its values this schema where `Topic.alter` would.

        Raises:
            NotSupportedError: compaction with buffer="sidecar".
            TopicExistsError: the name is taken (with exists_ok, evolve: by a different topic).
            SchemaError: a column of values has a type, name or default that it cannot have.
            ValueError: an argument makes no sense.
        """
        self.require_writable()
        if not isinstance(name, str) or not name:
            raise ValueError(f"a topic's name is a non-empty string, not {name!r}")
        options = TopicOptions(
            compression=compression, cleanup=cleanup, tombstone_seconds=tombstone_seconds,
            retention_seconds=retention_seconds, retention_bytes=retention_bytes,
            retain_unacknowledged=retain_unacknowledged,
            segment_bytes=segment_bytes, segment_seconds=segment_seconds,
        ).with_values(declared(value_schema))  # fmt: skip
        values_of = evolved_values(value_schema) if evolve and value_schema is not None else None
        how: Any = {"exists_ok": exists_ok or evolve, "values_of": values_of}
        if self.instance.topics.find(name) is None:  # whoever dropped one may have died then
            group_members.forget_groups(self, name)
        return Topic(self, self.instance.topics.create(name, partitions, buffer, options, **how))

    def topic(self, name: AnyTopic) -> Topic:
        """The topic of this name.

        Raises:
            TopicNotFoundError: there is none.
        """
        return Topic(self, self.topic_info(name))

    def consumer(self, topic: AnyTopic, group: str, **rest: Unpack[GroupOptions]) -> GroupConsumer:
        """A member of a group, which reads its share of a topic. See `GroupConsumer`."""
        self.require_writable()
        found = self.topic(topic if isinstance(topic, str) else self.topic_info(topic).name)
        return GroupConsumer(self, found, group, **rest)

    @brief
    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        self.require_open()
        return self.instance.topics.names()

    @shielded
    def drop_topic(self, name: AnyTopic, missing_ok: bool = False) -> None:
        """Drop a topic, with all of groups in it; open transactions in it are aborted.

        Raises:
            TopicNotFoundError: there is none, and `missing_ok` is false.
        """
        self.require_writable()
        given = name if isinstance(name, str) else self.info_of(name, TopicInfo)
        text = given if isinstance(given, str) else given.name
        if self.instance.topics.drop(given):
            group_members.forget_groups(self, text)
        elif not missing_ok:
            raise TopicNotFoundError(f"there is no topic {text!r} to drop")

    # -- transactions ------------------------------------------------------------------

    def new_transaction(
        self,
        timeout: float | None = 60.0,
        isolation: Isolation = "snapshot",
        locking: Locking = "optimistic",
        keepalive: bool = True,
        lock_timeout: float = LOCK_TIMEOUT,
        name: str | None = None,
    ) -> Transaction:
        """Begin a transaction.

        Args:
            timeout: seconds from now after which it is aborted; None for no such bound, only
                that of its heartbeats (for jobs).
            isolation: "snapshot": it reads one snapshot, and of two that write the same key the
                first to commit wins; "serializable": also what it read must be unchanged.
            locking: "optimistic": nobody waits, who commits first wins; "partition": it
                locks each tablet that it writes to, and older transactions wait for it.
            keepalive: send heartbeats while this handle lives.
            lock_timeout: seconds for which it waits, in all of its timeout, for the end of a
                younger transaction that has locked a tablet.
            name: at most one of a name is open: the one before, of any process, is ended first. Its
                calls raise ProducerFencedError; a client from which another one has taken the name
                begins no more under it. To Kafka's clients it is a transactional id.
        """
        if name is None:
            return Transaction.begin(self, timeout, isolation, locking, keepalive, lock_timeout)
        own = (timeout, isolation, locking, keepalive, lock_timeout, name)
        return begin_transaction(self, dict(zip(DEFAULTS, own, strict=True)))

    def transaction(self, **options: Unpack[TransactionOptions]) -> Transaction:
        """`new_transaction`, for `with`: it commits at the end, and rolls back on an exception."""
        return self.new_transaction(**options)

    def run(
        self,
        fn: Callable[[Transaction], T],
        attempts: int | None = None,
        deadline: float | None = DEADLINE,
        **options: Unpack[TransactionOptions],
    ) -> T:
        """Call `fn(txn)` and commit; again, after a pause if need be, on whatever is retriable.

        A retry keeps the age of the first attempt; after two conflicts others wait for it.

        Args:
            fn: works with the transaction it gets, perhaps several times; not an `async def`.
            attempts: how often at most; None for any number.
            deadline: seconds from now after which none begins, None for never; what runs goes on.
            **options: of `new_transaction`.

        Raises:
            Exception: the last attempt's, or one without `retriable = True`, of whatever class.
        """
        tries = self.attempts({**options})
        try:
            return run(tries, self.outcome, fn, self.retries(attempts, deadline))
        finally:
            tries.close()

    def attempts(self, options: dict[str, Any]) -> Attempts:
        """The transactions of one `run`, with these options."""
        return Attempts(self, options)

    def retries(self, attempts: int | None, deadline: float | None) -> Retries:
        """Tells how often `run` tries again."""
        return Retries(self.instance.coordinator.metrics, attempts, deadline)

    @shielded
    def outcome(self, txn_id: int) -> TxnState:
        """Drive a transaction whose commit broke off to its end, and return how it ended."""
        context: TxnContext | None = self.instance.unstored(local := TxnId(txn_id).local)
        if context is not None:
            return commit_protocols.current(context).state
        return self.instance.coordinator.orchestrator.finish(local).state

    def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> Session:
        """A session outside of any transaction: each flush is one of its own. See `Session`."""
        self.require_writable()
        return Session(self, None, flush_mode, buffer_bytes)

    @shielded
    def transaction_state(self, id: int) -> TxnState:
        """The state of a transaction.

        Raises:
            TxnNotFoundError: no transaction has this id, it never wrote anything, or it ended
                so long ago that it was forgotten.
            CommitOutcomeUnknownError: its commit broke off, and how that ended was forgotten.
        """
        self.require_open()
        local = self.instance.local_id(id)
        context: TxnContext | None = self.instance.unstored(local)
        if context is not None and context.has_written:
            return commit_protocols.current(context).state
        return self.instance.coordinator.get(local).state

    @shielded
    def transactions(self) -> list[TxnInfo]:
        """All transactions in the status table: those that have not ended, and recent ones."""
        self.require_open()
        return admin.list_transactions(self.instance)

    @shielded
    def abort_transaction(self, id: int) -> None:
        """Abort a transaction of any process. Twice is fine.

        Raises:
            TxnNotFoundError: no transaction has this id.
            InvalidTxnStateError: it is committed.
        """
        self.require_writable()
        local = self.instance.local_id(id)
        context: TxnContext | None = self.instance.unstored(local)
        if context is None or not commit_protocols.abort_small(context, "aborted by hand"):
            self.instance.abort_by_hand(local)

    @shielded
    def keep_transaction_alive(self, id: int) -> None:
        """Send one heartbeat for an open transaction of any process.

        Raises:
            TxnNotFoundError: no transaction has this id.
            InvalidTxnStateError: it is being committed, or has ended.
        """
        self.require_writable()
        local = self.instance.local_id(id)
        context: TxnContext | None = self.instance.unstored(local)
        if context is not None:
            context.require_open("keep alive")  # it needs no heartbeats
        else:
            self.instance.coordinator.keep_alive(local)

    # -- reading -----------------------------------------------------------------------

    @brief
    def snapshot(self, at: Timestamp | datetime | None = None) -> Snapshot:
        """The store at one instant: the latest, or at a timestamp or aware datetime.

        Raises:
            ValueError: `at` is in the future, or a naive datetime.
        """
        self.require_open()
        return Snapshot(self, self.timestamp_of(at))

    # -- versions of applications ----------------------------------------------------------

    @shielded
    def applied(self, app_id: str) -> Applied | None:
        """The last committed version of an application, or None; see `Transaction.mark_applied`."""
        self.require_open()
        with self.instance.store.status.read() as cur:
            return applications.find(cur, app_id, self.instance.coordinator.tcid)

    @shielded
    def applications(self) -> dict[str, Applied]:
        """The last version of every application, by its id."""
        self.require_open()
        with self.instance.store.status.read() as cur:
            return applications.every(cur, self.instance.coordinator.tcid)

    @shielded
    def forget_applied(self, app_id: str) -> bool:
        """Let an application begin anew, from any version and with any source.

        What its versions committed stays. A driver that still runs commits its next version as
        the first one. Returns whether anything was known of it.
        """
        self.require_writable()
        with self.instance.store.status.write() as cur:
            return applications.forget(cur, app_id)

    # -- maintenance -----------------------------------------------------------------

    @shielded
    def stats(self) -> dict[str, Any]:
        """Numbers about the store: tables with rows, bytes and row sets; transactions; files."""
        self.require_open()
        return admin.store_stats(self.instance)

    def metrics(self) -> MetricsSnapshot:
        """Counters, gauges and histograms of this process, with an OpenMetrics text."""
        self.require_open()
        return self.instance.coordinator.metrics.snapshot()

    @shielded
    def check(self, progress: Callable[[int, int], None] | None = None) -> CheckReport:
        """Read everything and compare it with what it should be.

        Args:
            progress: called with (row sets done, row sets in all).
        """
        self.require_open()
        return admin.check_store(self.instance, progress)

    @shielded
    def repair_clock(self) -> Timestamp:
        """Set the store's clock to this machine's, where that is ahead; return its last timestamp.

        Needed once, when a store was not used for more than ten years: commits are refused until
        then, for the machine's clock might be wrong. It never goes back.
        """
        self.require_writable()
        with self.instance.store.status.write() as cur:
            return repair_clock(cur)

    @shielded
    def compact(self, progress: Callable[[int, int], None] | None = None) -> CompactReport:
        """Merge row sets now, leave out what no snapshot sees, and give back space. Of topics what
        retention does not keep goes, and by `cleanup="compact"` what later messages of a key hide.

        Readers and writers go on meanwhile. The files get shorter only where no other process
        has them open; otherwise their space is free for what is written next.

        Args:
            progress: called with (row versions done, row versions in all).

        Raises:
            StorageFullError: the disk is full; what is done is done, nothing is lost.
        """
        self.require_writable()
        return admin.compact_store(self.instance, progress)

    def backup(
        self,
        dest: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        filesystem: Any = None,
        bytes_per_second: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> BackupReport:
        """Copy all that is committed now, at one timestamp; `txnkv.restore` makes a store of it.

        Args:
            dest: nothing is there, or an empty folder; a path, or an address as s3://bucket/folder.
            base: an earlier backup of this store: files that are the same are linked, not copied.
            filesystem: of `pyarrow.fs`, in which `dest` and `base` are paths.
            bytes_per_second: the most that is written.
            progress: called with (bytes done, in all).

        Raises:
            ValueError: `dest` has files or is a mount point; or `base` is of another store or copy.
            StoreNotFoundError, NotSupportedError: it leads over a file; this user may not write.
            CorruptionError, StorageFullError: a part is damaged, or no room; nothing is left.
            UnavailableError: the file system failed.
        """
        self.require_writable()
        return back_up(self.instance, dest, base, progress, bytes_per_second, filesystem)

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
        return admin.accept_loss(self.instance, part, really=not dry_run)
