"""Typed values as they are given: declared by a mapping, sent as a row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import pyarrow as pa

from txnkv.core import column_type
from txnkv.errors import SchemaError
from txnkv.tables import Column, RowChecker, Schema
from txnkv.topics import Encoded, TopicInfo, ValueCodec

ValueSchema: TypeAlias = Mapping[str, str | pa.DataType | Column] | pa.Schema
"""Columns of values: as those of a `Schema`, or Arrow's."""

Encode: TypeAlias = Callable[[Any], bytes | None]


def declared(given: ValueSchema | None) -> pa.Schema | None:
    """A value schema as a topic keeps it.

    Raises:
        SchemaError: a type is unknown, or a column has a default.
        TypeError: it is no schema.
    """
    if given is None:
        return None
    if isinstance(given, pa.Schema):
        return pa.schema([pa.field(f.name, column_type(f.type), f.nullable) for f in given])
    if not isinstance(given, Mapping):
        raise TypeError(
            "value_schema is a mapping of names to types, as {'id': 'int64', 'note': 'string?'}, "
            f"or a pyarrow.Schema, not {type(given).__name__}"
        )
    for name, each in given.items():
        if isinstance(each, Column) and each.default is not None:
            raise SchemaError(
                f"column {name!r} of a value schema has a default: messages have none; make it "
                "nullable, or send the value"
            )
    return _Columns(given).arrow


def encoder_of(topic: TopicInfo) -> Encode | None:
    """Return the function that makes bytes of a topic's rows; None where values are bytes.

    The function takes a dict, a tuple in schema order, a dataclass or None, and raises SchemaError
    for anything else and for what does not fit.
    """
    codec = topic.options.codec
    return None if codec is None else _encoder(codec)


class _Columns(Schema):
    """Columns without a key."""

    def __init__(self, columns: Mapping[str, str | pa.DataType | Column]) -> None:
        super().__init__(columns, ())

    def _check_key(self) -> None:
        return


@lru_cache(maxsize=256)
def _encoder(codec: ValueCodec) -> Encode:
    columns = _Columns({f.name: Column(f.type, f.nullable) for f in codec.schema})
    check = RowChecker(columns).of("insert")
    to_bytes = codec.encode_one

    def encode(value: Any) -> bytes | None:
        if value is None or type(value) is Encoded:
            return value
        try:
            return to_bytes(check(value))
        except SchemaError as error:
            raise SchemaError(f"a value of columns {codec.described}: {error}") from None
        except (TypeError, ValueError) as error:
            if isinstance(value, dict | tuple | list):
                raise SchemaError(f"a value of columns {codec.described}: {error}") from None
            raise SchemaError(
                f"the topic's values have the columns {codec.described}: send a dict, a tuple in "
                f"this order or a dataclass, not {type(value).__name__}; columns of many rows go "
                "through send_batch()"
            ) from None

    return encode
