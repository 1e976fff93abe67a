"""The data source that Spark knows as format "txnkv".

    options            spark.read           readStream        df.write            writeStream
    table              reading              -                 writing             stream_writer
    table, changes     -                    stream_readers    -                   -
    topic              reading              stream_readers    writing             stream_writer

Each of them is imported by who needs it: a batch job does without what streams import, which
takes a later version of Spark.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from txnkv.errors import NotSupportedError, SchemaError
from txnkv.spark.columns import arrow_schema, spark_schema
from txnkv.spark.settings import (
    CHANGES,
    TABLE,
    TOPIC,
    ChangesRead,
    Settings,
    StreamWrite,
    TopicRead,
    TopicWrite,
    names_topic,
    what_is_read,
)
from txnkv.spark.worker_client import client_of, schema_of

_STREAMS_NEED: Final = "pyspark.sql.streaming.datasource"
"""The module of Spark that streams are built on; since Spark 4.2."""


class TxnkvDataSource(DataSource):
    """Tables and topics, in batches and streams. Everything is checked while Spark plans."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "txnkv"

    def schema(self) -> StructType:
        """The columns of what is read, or those of option `columns`.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            StoreNotFoundError, TableNotFoundError, TopicNotFoundError, SchemaError: what it names
                is not there.
        """
        kind = what_is_read(self.options)
        if kind == TOPIC:
            return _topic_schema(TopicRead.of_schema(self.options), None)
        if kind == CHANGES:
            _require_streams()
            return _changes_schema(ChangesRead.of_stream(self.options), None)
        settings = Settings.of_read(self.options)
        return spark_schema(schema_of(settings), settings.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of a table or topic.

        Raises:
            SchemaError: the caller gave a schema, and it is not a projection of the one there is.
            NotSupportedError: changes are asked for.
        """
        kind = what_is_read(self.options)
        if kind == TOPIC:
            from txnkv.spark.reading import TopicReader

            of_topic = TopicRead.of_batch(self.options)
            own = _topic_schema(of_topic, schema)
            _require_same(schema, own, f"topic {of_topic.topic!r}", of_topic.columns)
            return TopicReader(of_topic, arrow_schema(schema))
        if kind == CHANGES:
            raise NotSupportedError(
                "changes are read by spark.readStream; in a batch, read the table at two "
                "snapshots, or use Table.diff"
            )
        from txnkv.spark.reading import PushingReader, TxnkvReader, pushdown_asked_for

        settings = Settings.of_read(self.options)
        own = spark_schema(schema_of(settings), schema.names)
        _require_same(schema, own, f"table {settings.table!r}", settings.columns)
        pushing = settings.push_filters and pushdown_asked_for()
        return (PushingReader if pushing else TxnkvReader)(settings, arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer into a table or topic, its job begun. In mode overwrite the rows that the
        transaction sees now are deleted by the job.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            SchemaError: the data does not fit.
        """
        from txnkv.spark.writing import JobWriter

        of = TopicWrite.of_batch if names_topic(self.options) else Settings.of_write
        return JobWriter.start(of(self.options, overwrite=overwrite), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A reader of a topic, or of a table's changes.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            SchemaError: the caller gave a schema, and it is not a projection of the one there is.
            NotSupportedError: a table is asked for, not its changes; or Spark is too old.
        """
        _require_streams()
        kind = what_is_read(self.options)
        if kind == TABLE:
            raise NotSupportedError(
                "a table is no stream: read what changes in it, with "
                ".option('changes', 'true'), or the table itself with spark.read"
            )
        if kind == CHANGES:
            from txnkv.spark.streams import ChangesStreamReader

            changes = ChangesRead.of_stream(self.options)
            own = _changes_schema(changes, schema)
            _require_same(schema, own, f"changes of table {changes.table!r}", changes.columns)
            return ChangesStreamReader(changes, arrow_schema(schema))
        from txnkv.spark.streams import TopicStreamReader

        settings = TopicRead.of_stream(self.options)
        own = _topic_schema(settings, schema)
        _require_same(schema, own, f"topic {settings.topic!r}", settings.columns)
        return TopicStreamReader(settings, arrow_schema(schema))

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """A sink into a table or topic, a transaction for each micro batch.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            SchemaError: the data does not fit.
            NotSupportedError: Spark is too old.
        """
        _require_streams()
        from txnkv.spark.streams import stream_writer_of

        return stream_writer_of(StreamWrite.of_stream(self.options, overwrite=overwrite), schema)


def _topic_schema(settings: TopicRead, asked: StructType | None) -> StructType:
    from txnkv.spark.reading import topic_schema

    topic = client_of(settings).topic(settings.topic)
    return topic_schema(topic, settings.columns if asked is None else asked.names)


def _changes_schema(settings: ChangesRead, asked: StructType | None) -> StructType:
    from txnkv.spark.streams import changes_schema

    table = client_of(settings).table(settings.table)
    return changes_schema(table.schema, settings.columns if asked is None else asked.names)


def _require_same(
    given: StructType, own: StructType, what: str, columns: tuple[str, ...] | None
) -> None:
    """Refuse a schema of the caller's that is not ours.

    Raises:
        SchemaError: a type differs, or nulls may come where the caller has none.
        ValueError: it has other columns than option `columns` says.
    """
    if columns is not None and tuple(given.names) != columns:
        raise ValueError(
            f"option columns names {', '.join(columns)}, and the schema given has "
            f"{', '.join(given.names)}: leave out one of them"
        )
    for mine, theirs in zip(own, given, strict=True):
        if mine.dataType != theirs.dataType or (mine.nullable and not theirs.nullable):
            raise SchemaError(
                f"column {theirs.name!r} of {what} is "
                f"{mine.dataType.simpleString()}{'' if mine.nullable else ' not null'}, the "
                f"schema given says {theirs.dataType.simpleString()}"
                f"{'' if theirs.nullable else ' not null'}: leave out .schema(...)"
            )


def _require_streams() -> None:
    if importlib.util.find_spec(_STREAMS_NEED) is None:
        raise NotSupportedError("streams need pyspark 4.2 or later: pip install -U pyspark")
