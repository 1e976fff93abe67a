"""Topics, and the changes of tables, as sources of streams.

Spark asks for the end of the next batch, writes it into its checkpoint, has the batch planned,
and runs it: again, from the checkpoint, if it did not see it end. One long-lived process plans;
tasks get what it pinned. `topic_planner` says what makes a batch of a topic the same each time.

    id    total   _op      _commit_timestamp
    1     9.5     insert   890663553417482240     there when the query began: the first load
    2     4.0     insert   890663553417482240
    1     11.0    update   890663553731055616     then what changed: rows as they are now,
    2     4.0     delete   890663553731055616     deleted ones as they were

A batch of changes has the net change of each key between two commit timestamps: see `tables.diff`,
which tells it by stamps, wherever flush and compaction put them. Rows of the first load carry the
timestamp of the snapshot that they were read at; when each was committed may be forgotten, and a
batch that runs again must give the same.

The plan of a stream of changes: where a batch ends, what it reads, and what is kept for it.

    latest     the latest snapshot, if the table changed since the last one; else where it stood,
               however much is committed into other tables (a sink in the same store, say)
    tasks      the diff between two times, cut into tokens; of the first batch, a scan at its end
    kept       snapshots: one where the next batch begins, one where it ends, from when it is
               planned until Spark says that it is done. So a query that runs is never overtaken
               by the history, and tasks that run again read what they read before

While a table does not change its stream stands still, and the history goes on. So the planner
remembers up to when it saw nothing (`since` of the next end), and when the checkpoint gets old
it ends a batch without rows: a query that was stopped has half of the history to come back.

A stream's position is in Spark's checkpoint:

    {"store": "4f...", "table": "orders", "id": 3, "timestamp": 890663553417482240, "since": 0}

All that committed up to `timestamp` is read. `since` is where the batch begins that ends here:
Spark writes no start of a query's first batch, and asks for another when it runs that batch
again. It may also lie above the end of the batch before, where nothing changed in between. The
batch that begins at 0 is the first load: all rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import LongType, StringType, StructField, StructType

from txnkv.client import Client, DiffToken, Planning, Snapshot
from txnkv.coordinator import Timestamp
from txnkv.errors import (
    HistoryExpiredError,
    NotSupportedError,
    OffsetOutOfRangeError,
    SchemaError,
    TableNotFoundError,
)
from txnkv.spark.columns import FormerRows, ToSpark, require_promised, spark_schema
from txnkv.spark.reading import cut, planned, read_task, tasks
from txnkv.spark.settings import ChangesRead, TopicRead
from txnkv.spark.worker_client import client_of
from txnkv.tables import BATCH_ROWS, COMMIT_TIMESTAMP, OP, Schema
from txnkv.topics import TopicOffset
from txnkv.transaction import ScanToken

_ADDED: Final = {
    OP: StructField(OP, StringType(), False),
    COMMIT_TIMESTAMP: StructField(COMMIT_TIMESTAMP, LongType(), False),
}


def changes_schema(table: Schema, columns: Sequence[str] | None) -> StructType:
    """The schema that Spark sees: columns of the table, `_op` and `_commit_timestamp`.

    Args:
        table: the table's schema.
        columns: the projection, in order; None for all columns.

    Raises:
        SchemaError: there is no such column, or Spark has no type for it, or the table has one
            of the name of a column that is added.
    """
    names = [*table.names, *_ADDED] if columns is None else list(columns)
    for name in names:
        if name in _ADDED and name in table.columns:
            raise SchemaError(
                f"the table has a column {name!r}, and so have its changes: leave it out by "
                "option columns"
            )
    own = spark_schema(table, _of_table(names))
    return StructType([_ADDED[name] if name in _ADDED else own[name] for name in names])


def _of_table(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in _ADDED]


class ChangesPartition(InputPartition):
    """The part of a batch that one task reads.

    Attributes:
        token: of changes; or of rows of the first load.
        at: when the batch ends.
        rows: as they were then.
    """

    def __init__(self, token: ScanToken | DiffToken, at: int, rows: FormerRows) -> None:
        super().__init__(None)
        self.token = token
        self.at = at
        self.rows = rows


# -- the plan of changes ---------------------------------------------------------------

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


LEAST_ROWS: Final = 1 << 14
"""No more tasks where each would have fewer."""
_LEAST_PAUSE: Final = 60.0
"""Seconds between two batches without rows, however short the history."""


class ChangesPlanner:
    """Plans the batches of one query, in one process, as long as that runs.

    Args:
        settings: of the stream.
        columns: of the table, those to read, as Spark expects them.
    """

    def __init__(self, settings: ChangesRead, columns: pa.Schema) -> None:
        self._settings = settings
        self._promised = columns
        self._kept: dict[Timestamp, Snapshot] = {}
        self._quiet: tuple[Timestamp, Timestamp] | None = None  # nothing changed between these
        self._target: Timestamp | None = None
        self._stands: ChangesOffset | None = None
        self._last_client: Client | None = None

    # -- where -------------------------------------------------------------------------

    def initial(self) -> ChangesOffset:
        """Return the point where a query begins that has not begun yet.

        Raises:
            HistoryExpiredError: option startingOffsets names a time before the history.
            ValueError: it names one in the future.
        """
        client = self._client()
        starting = self._settings.starting_offsets
        if starting == "earliest":
            return self._at(client, BEGINNING)
        if isinstance(starting, str):
            return self._at(client, self._keep_latest(client))
        at = Planning.of(client).timestamp_of(starting)
        self._keep(client, at, "startingOffsets is")
        return self._at(client, at)

    def latest(self, start: ChangesOffset) -> ChangesOffset:
        """Return the end of a batch that begins at `start`; `start` itself when there is nothing.

        Raises:
            HistoryExpiredError: what comes next is gone.
            OffsetOutOfRangeError: the store was restored to an earlier time.
            TableNotFoundError: the table was dropped.
        """
        self._stands = self._latest(start)
        return self._stands

    def _latest(self, start: ChangesOffset) -> ChangesOffset:
        client = self._client()
        self._check(client, start)
        since = self._since(start)
        if since > BEGINNING:
            self._keep(client, since, "the checkpoint is at")
        end = self._keep_latest(client) if self._target is None else self._target
        if end <= since:
            return start
        changed = Planning.of(client).changed(self._settings.table, since, end)
        if since > BEGINNING:  # kept until now: nothing was forgotten
            self._keep(client, since, "the checkpoint is at")
        if changed:
            self._keep_only(since, end)
            return self._at(client, end, since)
        if start.timestamp == BEGINNING:
            return start
        self._quiet = start.timestamp, end
        self._keep_only(end)
        return self._at(client, end, end) if self._is_old(client, start, end) else start

    def newest(self) -> ChangesOffset:
        """Up to where there is something to read: where the stream stands, if that is all."""
        client = self._client()
        planning, stands = Planning.of(client), self._stands
        at = planning.timestamp_of(None)
        if stands is not None and stands.timestamp > BEGINNING:
            since = self._since(stands)
            if at <= since or not planning.changed(self._settings.table, since, at):
                return stands
        return self._at(client, at)

    def stop_at_latest(self) -> None:
        """From now on nothing new is read."""
        self._target = self._keep_latest(self._client())

    # -- what --------------------------------------------------------------------------

    def tasks(self, start: ChangesOffset, end: ChangesOffset) -> list[ChangesPartition]:
        """Return the parts of what a batch reads; none when that is nothing.

        Raises:
            HistoryExpiredError: some of it is gone.
            OffsetOutOfRangeError: the store was restored to an earlier time.
            TableNotFoundError: the table was dropped.
            SchemaChangedError: it was altered, and a column is not there or another one.
        """
        since, upto = start.timestamp if end.since is None else end.since, end.timestamp
        client = self._client()
        self._check(client, end)
        if since >= upto:
            return []
        table, planning = client.table(self._settings.table), Planning.of(client)
        # Spark has the columns of now, the batch perhaps those of before an alter.
        now, then = planning.schema_of(table.name), planning.schema_of(table.name, upto)
        require_promised(table.name, now, self._promised)
        former = FormerRows(table.name, then, now, self._promised)
        tokens: list[ScanToken] | list[DiffToken]
        if since == BEGINNING:
            self._keep(client, upto, "the first load is at")
            tokens = cut(table.scan(former.names, snapshot=upto).tokens, LEAST_ROWS)
        else:
            self._keep(client, since, "the batch that is to be read begins at")
            tokens = cut(
                lambda rows: table.diff_tokens(since, upto, former.names, rows), LEAST_ROWS
            )
        return [ChangesPartition(token, int(upto), former) for token in tokens]

    # -- what is kept ------------------------------------------------------------------

    def done(self, end: ChangesOffset) -> None:
        """A batch that ends here is done: what it read is not needed any more."""
        self._keep_only(*(at for at in self._kept if at >= end.timestamp))

    def close(self) -> None:
        """Keep nothing."""
        self._keep_only()

    def _keep(self, client: Client, at: Timestamp, what: str) -> None:
        """Pin the history from a time on.

        Raises:
            HistoryExpiredError: it is gone: the store's, or the table's own, which is shorter; or
                it was kept by a server that was started again.
        """
        try:
            if at not in self._kept:
                self._kept[at] = client.snapshot(at)
            error = None
        except HistoryExpiredError as expired:
            error = expired
        _, floor, _ = Planning.of(client).kept(self._settings.table)
        if error is not None or at < floor:
            raise _gone(self._settings.table, at, what, floor) from error

    def _keep_latest(self, client: Client) -> Timestamp:
        """Pin the latest snapshot."""
        found = Planning.of(client).latest()
        self._kept.setdefault(found.timestamp, found)
        return found.timestamp

    def _keep_only(self, *wanted: Timestamp) -> None:
        for at in [at for at in self._kept if at not in wanted and at != self._target]:
            self._kept.pop(at).close()

    # -- looking -----------------------------------------------------------------------

    def _client(self) -> Client:
        client = client_of(self._settings)
        if client is not self._last_client:  # another store at the path: its pins are not ours
            self._last_client = client
            self._kept.clear()
        return client

    def _since(self, start: ChangesOffset) -> Timestamp:
        """`start`, or later, where nothing changed since."""
        if self._quiet is not None and self._quiet[0] == start.timestamp:
            return self._quiet[1]
        return start.timestamp

    def _is_old(self, client: Client, start: ChangesOffset, end: Timestamp) -> bool:
        age = (end.micros - start.timestamp.micros) / 1e6
        kept, _, _ = Planning.of(client).kept(self._settings.table)
        return age > max(kept / 2, _LEAST_PAUSE)

    def _at(
        self, client: Client, timestamp: Timestamp, since: Timestamp | None = None
    ) -> ChangesOffset:
        name = self._settings.table
        id = client.table_info(name).id
        return ChangesOffset(Planning.of(client).store_id, name, id, timestamp, since)

    def _check(self, client: Client, offset: ChangesOffset) -> None:
        """The table is the one of the checkpoint, in the same store and no earlier."""
        planning = Planning.of(client)
        if offset.store != planning.store_id:
            raise TableNotFoundError(
                f"the checkpoint is of table {offset.table!r} in store {offset.store}, at "
                f"{self._settings.path} is store {planning.store_id}: another was made there, or "
                "the path is wrong. Give the path of its own store, or begin again with a new "
                "checkpoint"
            )
        table = client.table_info(self._settings.table)
        if offset.id != table.id:
            raise TableNotFoundError(
                f"table {offset.table!r} of the checkpoint (id {offset.id}) was dropped, and "
                f"another was made under its name (id {table.id}): begin again with a new "
                "checkpoint"
            )
        if offset.timestamp > planning.timestamp_of(None):
            _, _, last = planning.kept(self._settings.table)
            if offset.timestamp > last:
                raise OffsetOutOfRangeError(
                    f"the checkpoint is at {offset.timestamp.datetime.isoformat()} "
                    f"({offset.timestamp}), the last commit of the store is at "
                    f"{last.datetime.isoformat()} ({last}): the store was restored to "
                    "an earlier time, and what the query read since then is not in it. Begin "
                    "again with a new checkpoint, and a target of the same time"
                )


def _gone(table: str, at: Timestamp, what: str, floor: Timestamp) -> HistoryExpiredError:
    return HistoryExpiredError(
        f"the changes of table {table!r} are gone: {what} {at.datetime.isoformat()} ({at}), its "
        f"history goes back to {floor.datetime.isoformat()} ({floor}). Begin again with a new "
        "checkpoint and startingOffsets 'earliest' (all rows, then changes; upserts into an "
        "emptied target make it whole); and open the store everywhere with a history= (option "
        "history here), or give the table one, that is longer than the query may be stopped"
    )


# -- the sources -----------------------------------------------------------------------


class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the changes of a table as a stream.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: ChangesRead, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected
        columns = [expected.field(name) for name in _of_table(expected.names)]
        self._planner = ChangesPlanner(settings, pa.schema(columns))

    def __reduce__(self) -> tuple[Any, ...]:
        """A task gets a reader that keeps nothing: what it is to read is in its partition."""
        return ChangesStreamReader, (self._settings, self._expected)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the point where a new query begins.

        Raises:
            HistoryExpiredError: option startingOffsets names a time before the history.
            ValueError: it names one in the future.
        """
        return self._planner.initial().json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the batch that begins at `start`; `start` when nothing changed.

        A batch takes all there is: how many rows changed since is known when they are read.

        Raises:
            HistoryExpiredError: what comes next is gone.
            OffsetOutOfRangeError: the store was restored to an earlier time.
            TableNotFoundError: the table was dropped.
        """
        begun = self._parsed(start)
        end = self._planner.latest(begun)
        # Spark compares texts: the same place must be the same text.
        return start if end is begun else end.json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The latest snapshot of the store, for the query's progress."""
        return self._planner.newest().json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing new is read."""
        self._planner.stop_at_latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the changes between two points, cut for tasks; they stay readable until `commit`.

        Raises:
            HistoryExpiredError: some of it is gone.
            OffsetOutOfRangeError: the store was restored to an earlier time.
            TableNotFoundError: the table was dropped.
        """
        return self._planner.tasks(self._parsed(start), self._parsed(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of one part, as Arrow batches."""
        if not isinstance(partition, ChangesPartition):
            return  # Spark's own placeholder for a batch without partitions
        convert, names = ToSpark(self._expected), self._expected.names
        try:
            for batch in self._batches(partition):
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield convert.batch(batch.slice(start, BATCH_ROWS).select(names))
        except HistoryExpiredError as error:  # what the planner kept was lost with its server
            token, table = partition.token, self._settings.table
            at = Timestamp(token.parts.start if isinstance(token, DiffToken) else partition.at)
            _, floor, _ = Planning.of(client_of(self._settings)).kept(table)
            raise _gone(table, at, "the batch is read from", floor) from error

    def commit(self, end: dict[str, Any]) -> None:
        """Let go of the history before `end`."""
        self._planner.done(self._parsed(end))

    def stop(self) -> None:
        """Let go of all history; the process keeps its client, and ends with the query."""
        self._planner.close()

    def _batches(self, partition: ChangesPartition) -> Iterator[pa.RecordBatch]:
        token, client = partition.token, client_of(self._settings)
        if isinstance(token, DiffToken):
            for batch in token.open(client):
                yield self._of_now(partition, batch, batch.columns[-2:])
            return
        for batch in token.open(client).to_batches():
            at = pa.repeat(pa.scalar(partition.at, pa.int64()), batch.num_rows)
            yield self._of_now(partition, batch, [pa.repeat("insert", batch.num_rows), at])

    def _of_now(
        self, partition: ChangesPartition, batch: pa.RecordBatch, added: list[pa.Array]
    ) -> pa.RecordBatch:
        names = [*_of_table(self._expected.names), OP, COMMIT_TIMESTAMP]
        return pa.RecordBatch.from_arrays([*partition.rows.brought(batch), *added], names=names)

    def _parsed(self, given: dict[str, Any]) -> ChangesOffset:
        return ChangesOffset.parse(given, self._settings.table)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as a stream.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: TopicRead, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected
        self._target: TopicOffset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the point where a new query begins.

        Raises:
            OffsetOutOfRangeError: option startingOffsets names an offset that is not there.
        """
        return self._planned("initial").json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Option maxOffsetsPerTrigger."""
        most = self._settings.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the batch that begins at `start`; `start` when there is nothing.

        Raises:
            OffsetOutOfRangeError: what comes next is gone, or the log ends before the start.
            TopicNotFoundError: the topic was dropped.
        """
        if not isinstance(limit, ReadAllAvailable | ReadMaxRows):
            raise NotSupportedError(f"a topic is read by offsets, not by {type(limit).__name__}")
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        begun = self._parsed(start)
        end = self._planned("latest", begun, most, self._target)
        # Spark compares texts: the same place must be the same text.
        return start if end == begun else end.json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Up to where there is something to read, for the query's progress."""
        return self._planned("ends").json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing new is read."""
        self._target = self._planned("ends")

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks that read what lies between two points, pinned.

        Raises:
            OffsetOutOfRangeError: some of it is gone, or never was in this store.
            TopicNotFoundError: the topic was dropped.
        """
        return tasks(self._settings, self._parsed(start), self._parsed(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one part, as Arrow batches."""
        return read_task(self._settings, self._expected, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to be done: topics are kept by retention, not by readers."""

    def stop(self) -> None:
        """Nothing is held: the process keeps its client, and ends with the query."""

    def _parsed(self, given: dict[str, Any]) -> TopicOffset:
        return TopicOffset.parse(given, self._settings.topic, self._settings.order)

    def _planned(self, what: str, *args: Any) -> TopicOffset:
        found: TopicOffset = planned(self._settings, what, *args)
        return found
