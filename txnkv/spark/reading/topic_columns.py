"""Messages as rows of Spark.

    key        binary                                    null: none
    value      binary                                    null: none; or the topic's declared
                                                         columns, first and in its place
    headers    array<struct<key string, value binary>>   null: none
    partition  int
    offset     long
    timestamp  timestamp
    txn_id     long                                      its local part; null: of none

A row has exactly the schema that Spark was promised; what was not asked for is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import types as spark

from txnkv import core
from txnkv.client import Topic
from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.spark.columns import spark_type
from txnkv.topics import ValueCodec

_HEADER: Final = spark.StructType(
    [
        spark.StructField("key", spark.StringType(), False),
        spark.StructField("value", spark.BinaryType(), False),
    ]
)
_KEY: Final = spark.StructField("key", spark.BinaryType(), True)
_VALUE: Final = spark.StructField("value", spark.BinaryType(), True)
_REST: Final = (
    spark.StructField("headers", spark.ArrayType(_HEADER, False), True),
    spark.StructField("partition", spark.IntegerType(), False),
    spark.StructField("offset", spark.LongType(), False),
    spark.StructField("timestamp", spark.TimestampType(), False),
    spark.StructField("txn_id", spark.LongType(), True),
)


def topic_schema(topic: Topic, columns: Sequence[str] | None) -> spark.StructType:
    """The schema that Spark sees.

    Args:
        topic: what is read.
        columns: the projection, in order; None for all columns.

    Raises:
        SchemaError: there is no such column, or Spark has no type for it.
    """
    codec = topic.info.options.codec
    kinds = {} if codec is None else {field.name: field.type for field in codec.columns}
    fields: dict[str, spark.StructField | None] = dict.fromkeys(kinds)
    own = (_KEY, _VALUE, *_REST) if codec is None else (_KEY, *_REST)
    fields.update({field.name: field for field in own})
    for name in columns or ():
        if name not in fields:
            raise SchemaError(
                f"there is no column {name!r}: messages of topic {topic.name!r} have "
                f"{', '.join(fields)}"
            )
    return spark.StructType(
        [
            fields[name] or spark.StructField(name, spark_type(kinds[name], name), True)
            for name in (fields if columns is None else columns)
        ]
    )


class TopicRows:
    """Brings messages into the schema that Spark expects.

    Args:
        expected: the Arrow schema of what Spark was promised.
        codec: of the topic's values; None for bytes.
    """

    def __init__(self, expected: pa.Schema, codec: ValueCodec | None) -> None:
        self._expected = expected
        self._codec = codec
        declared = () if codec is None else codec.columns.names
        self._declared = [name for name in expected.names if name in declared]

    def batch(self, messages: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """Rows of one partition's messages, whose columns are those of `core.MESSAGES`."""
        decoded: dict[str, pa.Array] = {}
        if self._codec is not None and self._declared:
            values = self._codec.decode(messages.column("value"), self._declared)
            decoded = dict(zip(self._declared, values.columns, strict=True))
        arrays = []
        for field in self._expected:
            if field.name in decoded:
                made = decoded[field.name]
            else:
                made = self._column(field, messages, partition)
            same = made.type.equals(field.type) and not pa.types.is_list(field.type)
            arrays.append(made if same or field.name == "headers" else made.cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._expected)

    def _column(self, field: pa.Field, messages: pa.RecordBatch, partition: int) -> pa.Array:
        if field.name == "partition":
            return pa.repeat(pa.scalar(partition, pa.int32()), messages.num_rows)
        found = messages.column(field.name)
        if field.name == "offset":
            return found.view(pa.int64())
        if field.name == "txn_id":
            return _ids(found.view(pa.int64()))
        if field.name == "headers":
            return _headers(found, field.type)
        return found


def _ids(locals_: pa.Int64Array) -> pa.Int64Array:
    """Null for 0, which is no transaction's."""
    if pc.min(locals_).as_py() == 0:
        return pc.if_else(pc.not_equal(locals_, 0), locals_, None)
    return locals_


def _headers(blobs: pa.BinaryArray, kind: pa.DataType) -> pa.Array:
    if blobs.null_count == len(blobs):
        return pa.nulls(len(blobs), kind)
    made = core.split_headers(blobs)
    return made if made.type.equals(kind) else made.cast(kind)
