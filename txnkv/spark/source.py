"""The data source that Spark knows as format "txnkv"."""

from __future__ import annotations

from typing import Final, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter
from pyspark.sql.types import StructType

from txnkv.errors import NotSupportedError, SchemaError
from txnkv.spark.columns import arrow_schema, spark_schema
from txnkv.spark.joining import client_of
from txnkv.spark.reading import pushdown
from txnkv.spark.reading.table_reader import PushingReader, TxnkvReader
from txnkv.spark.settings import Settings
from txnkv.spark.writing.table_writer import TxnkvWriter

_NO_STREAMS: Final = (
    "this version has no streams: read and write in batches, with spark.read and df.write "
    "(in foreachBatch, say)"
)


class TxnkvDataSource(DataSource):
    """Tables, read and written in batches. Everything is checked while Spark plans."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "txnkv"

    def schema(self) -> StructType:
        """The table's columns, or those of option `columns`.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            StoreNotFoundError, TableNotFoundError, SchemaError: what it names is not there.
        """
        settings = Settings.of_read(self.options)
        table = client_of(settings).table(settings.table)
        return spark_schema(table.schema, settings.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of a table.

        Raises:
            SchemaError: the caller gave a schema, and it is not a projection of the table's.
        """
        settings = Settings.of_read(self.options)
        table = client_of(settings).table(settings.table)
        own = spark_schema(table.schema, schema.names)
        for mine, given in zip(own, schema, strict=True):
            if mine.dataType != given.dataType or (mine.nullable and not given.nullable):
                raise SchemaError(
                    f"column {given.name!r} of table {settings.table!r} is "
                    f"{mine.dataType.simpleString()}{'' if mine.nullable else ' not null'}, the "
                    f"schema given says {given.dataType.simpleString()}"
                    f"{'' if given.nullable else ' not null'}: leave out .schema(...)"
                )
        pushing = settings.push_filters and pushdown.asked_for()
        return (PushingReader if pushing else TxnkvReader)(settings, arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer into a table, its job begun. In mode overwrite the rows that the transaction
        sees now are deleted by the job.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            SchemaError: the data does not fit the table.
        """
        return TxnkvWriter.start(Settings.of_write(self.options, overwrite=overwrite), schema)

    def streamReader(self, schema: StructType) -> NoReturn:  # noqa: N802
        """Not in this version: raises NotSupportedError."""
        raise NotSupportedError(_NO_STREAMS)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: N802
        """Not in this version: raises NotSupportedError."""
        raise NotSupportedError(_NO_STREAMS)
