"""The bytes that calls and answers are between hosts.

    0        4        8              8 + 8 b          8 + 8 b + n
    +--------+--------+--------------+----------------+---------+---------+--
    | n      | b      | b sizes      | JSON, n bytes  | blob 0  | blob 1  | ...
    +--------+--------+--------------+----------------+---------+---------+--

JSON's own values stand as they are, packed and unpacked in C; any other is an object of one entry,
{"!": [kind, content]}: a tuple, bytes (the number of a blob), a decimal, Arrow data as an IPC
stream, one of the data classes in `_CLASSES`, an error. So what comes from another host becomes one
of these and nothing else; no byte of it names code. A handle, as a table's, has no value here: each
side gives `pack` and `unpack` a function that turns handles into names and back.
"""

from __future__ import annotations

import builtins
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cache
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from txnkv import errors
from txnkv.client import CheckReport, CompactReport, DiffToken, Index, TxnInfo
from txnkv.coordinator import Applied, Timestamp, TxnId, TxnState
from txnkv.core import compute as pc
from txnkv.errors import (
    CommitOutcomeUnknownError,
    RowError,
    RowErrors,
    TxnkvError,
    UnavailableError,
)
from txnkv.metrics import MetricsSnapshot
from txnkv.tables import (
    Column,
    DiffParts,
    HashPartition,
    RangePartition,
    Schema,
    TokenParts,
    arrow_input,
)
from txnkv.topics import (
    AbortedTxn,
    Delivered,
    Encoded,
    FetchResult,
    Message,
    MessageId,
    PinnedRange,
    SubscriptionInfo,
    TopicInfo,
    TopicOffset,
    TopicOptions,
    TopicPart,
    TopicReading,
    ValueStage,
)
from txnkv.transaction import ScanToken, TxnToken, WriteResult


class LostHandleError(UnavailableError):
    """A handle is gone at the server: that was started again, or had not heard of this client for
    longer than its keepalive time.
    """


Tagged = list[Any]
"""A kind, and content of JSON's own values, where blobs are named by number."""

Refer = Callable[[Any], Tagged | None]
"""Names a handle; None: it is none."""

Resolve = Callable[[str, Any], Any]
"""Finds the handle that a kind and content name; raises ValueError for another kind."""

_TAG: Final = "!"
_TAGGED: Final = '"!"'
_HEAD: Final = struct.Struct(">II")
_DEEPEST: Final = 100
_PLAIN: Final = frozenset({type(None), bool, int, float, str})
_NAMES: Final = frozenset({str})
_to_json: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_of_json: Final = json.JSONDecoder().decode
_STRINGS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_INNERMOST: Final = re.compile(r"[\[{][^\[\]{}]*[\]}]")
_CLASSES: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        AbortedTxn, Applied, CheckReport, Column, CompactReport, Delivered, DiffParts, DiffToken,
        FetchResult, HashPartition, Index, MessageId, PinnedRange, RangePartition, RowError,
        ScanToken, SubscriptionInfo, TokenParts, TopicInfo, TopicOffset, TopicOptions, TopicPart,
        TopicReading, TxnInfo, ValueStage, WriteResult,
    )
}  # fmt: skip
_FROM_GUESTS: Final = {
    name: _CLASSES[name]
    for name in (
        "Column", "DiffParts", "DiffToken", "HashPartition", "MessageId", "PinnedRange",
        "RangePartition", "ScanToken", "TokenParts", "TopicOffset", "TopicPart", "TopicReading",
    )
}  # fmt: skip
"""Those that a server takes; it finds topics and the like by their names."""

_NUMBERS: Final = {kind.__name__: kind for kind in (Timestamp, TxnId, TxnState)}
_ERRORS: Final[dict[str, type[Exception]]] = {
    name: found
    for module in (errors, builtins)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Exception)
} | {"LostHandleError": LostHandleError}


def pack(value: Any, refer: Refer | None = None) -> bytes:
    """Return the bytes of a value.

    Raises:
        TypeError: it is of a type that does not cross hosts.
    """
    packer = _Packer(refer)
    text = _to_json(packer.down(value, 0)).encode()
    blobs = packer.blobs
    if not blobs:
        return _HEAD.pack(len(text), 0) + text
    head = struct.pack(f">II{len(blobs)}Q", len(text), len(blobs), *map(len, blobs))
    return b"".join((head, text, *blobs))


def unpack(data: bytes, resolve: Resolve | None = None) -> Any:
    """Return the value of some bytes, which may be anybody's.

    Raises:
        ValueError: they are none of a value, or of one that is too deep.
    """
    try:
        n, count = _HEAD.unpack_from(data)
        start = _HEAD.size + 8 * count
        sizes = struct.unpack_from(f">{count}Q", data, _HEAD.size) if count else ()
        at = start + n
        if at + sum(sizes) > len(data):
            raise ValueError(f"a message of {len(data)} bytes is one of {at + sum(sizes)}")
        blobs: list[bytes | None] = []
        for size in sizes:
            blobs.append(data[at : at + size])
            at += size
        text = data[start : start + n].decode()
        if text.count("[") + text.count("{") > _DEEPEST:
            _require_shallow(text)
        if _TAGGED not in text:
            return _of_json(text)
        return json.JSONDecoder(object_hook=_Unpacker(blobs, resolve).up).decode(text)
    except (struct.error, KeyError, IndexError, AttributeError, pa.ArrowException) as error:
        raise ValueError(f"a message makes no sense: {error}") from None
    except (TypeError, OverflowError, ArithmeticError) as error:
        raise ValueError(f"a message makes no sense: {error}") from None


def _require_shallow(text: str) -> None:
    """Refuse JSON that is nested deep, by what is left of it without its innermost parts."""
    left = _STRINGS.sub("", text)
    for _ in range(_DEEPEST):
        left, found = _INNERMOST.subn("", left)
        if not found:
            return
    raise ValueError(f"a message is nested deeper than {_DEEPEST}")


class _Packer:
    def __init__(self, refer: Refer | None) -> None:
        self.blobs: list[Any] = []
        self._refer = refer

    def down(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if depth > _DEEPEST:
            raise ValueError(f"a value is nested deeper than {_DEEPEST}")
        depth += 1
        if kind is list:
            if _PLAIN.issuperset(map(type, value)):  # in C, as most are
                return value
            return [each if type(each) in _PLAIN else self.down(each, depth) for each in value]
        if kind is dict and _TAG not in value and _NAMES.issuperset(map(type, value)):
            return {
                key: each if type(each) in _PLAIN else self.down(each, depth)
                for key, each in value.items()
            }
        return {_TAG: self._tagged(value, depth)}

    def _tagged(self, value: Any, depth: int) -> Tagged:
        found = None if self._refer is None else self._refer(value)
        if found is not None:
            return found
        kind: object = type(value)
        down = _down_of(kind)
        if down is not None:
            return down(self, value, depth)
        name = type(value).__name__
        if name == "Expression":  # of pyarrow.compute, which takes a while to load
            return ["x", self.blob(value.__reduce__()[1][0])]
        if name in _CLASSES and type(value) is _CLASSES[name]:
            return self._members(name, value, depth)
        if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
            return ["v", self.down(value.tolist(), depth)]
        if isinstance(value, Sequence | set | frozenset):
            return ["v", [self.down(each, depth) for each in value]]
        if is_dataclass(value):  # a row
            row = {each.name: getattr(value, each.name) for each in fields(value)}
            return ["v", self.down(row, depth)]
        if hasattr(value, "__index__"):
            return ["v", int(value)]
        raise TypeError(f"a {name} cannot be sent to another host")

    def _members(self, name: str, value: Any, depth: int) -> Tagged:
        names = getattr(value, "_fields", None) or [each.name for each in fields(value)]
        found = {each: self.down(getattr(value, each), depth) for each in names}
        return ["c", [name, found]]

    def blob(self, data: Any) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def stream(self, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> int:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return self.blob(sink.getvalue())

    def error(self, error: BaseException, depth: int) -> Tagged:
        """The nearest class of an error that both sides know, and what it says."""
        names = [kind.__name__ for kind in type(error).__mro__]
        name = next((each for each in names if _ERRORS.get(each) is not None), "Exception")
        more: dict[str, Any] = {"notes": list(getattr(error, "__notes__", ()))}
        text = str(error)
        if isinstance(error, RowErrors):
            more["rows"] = [error.errors, error.count, error.txn_id, error.rolled_back]
        elif isinstance(error, CommitOutcomeUnknownError):
            more["txn_id"] = int(error.txn_id)
        elif isinstance(error, OSError) and not isinstance(error, TxnkvError):
            more["os"] = [error.errno, error.strerror]
        return ["e", [name, text, self.down(more, depth)]]


def _items(packer: _Packer, value: Mapping[Any, Any], depth: int) -> Tagged:
    pairs = [[packer.down(key, depth), packer.down(each, depth)] for key, each in value.items()]
    return ["m", pairs]


def _tuple(packer: _Packer, value: tuple[Any, ...], depth: int) -> Tagged:
    name = type(value).__name__
    if name in _CLASSES:
        return packer._members(name, value, depth)
    return ["t", [packer.down(each, depth) for each in value]]


def _arrow(packer: _Packer, value: Any, depth: int) -> Tagged:
    if isinstance(value, pa.RecordBatch):
        return ["rb", packer.stream(value.schema, [value])]
    return ["tb", packer.stream(value.schema, value.to_batches())]


def _metrics(packer: _Packer, value: MetricsSnapshot, depth: int) -> Tagged:
    return ["metrics", [packer.down(dict(value), depth), packer.down(value.about, depth)]]


_DOWN: Final[tuple[tuple[Any, Callable[[_Packer, Any, int], Tagged]], ...]] = (
    (tuple, _tuple),
    (str, lambda _, value, __: ["v", str(value)]),
    (float, lambda _, value, __: ["v", float(value)]),
    (Encoded, lambda packer, value, _: ["enc", packer.blob(bytes(value))]),
    ((bytes, bytearray, memoryview), lambda packer, value, _: ["b", packer.blob(bytes(value))]),
    (tuple(_NUMBERS.values()), lambda _, value, __: ["i", [type(value).__name__, int(value)]]),
    (datetime, lambda _, value, __: ["dt", datetime.isoformat(value)]),
    (date, lambda _, value, __: ["d", value.isoformat()]),
    (time, lambda _, value, __: ["tm", value.isoformat()]),
    (timedelta, lambda _, v, __: ["td", [v.days, v.seconds, v.microseconds]]),
    (UUID, lambda _, value, __: ["u", value.hex]),
    (Decimal, lambda _, value, __: ["n", str(value)]),
    (MetricsSnapshot, _metrics),
    (Mapping, _items),
    ((pa.RecordBatch, pa.Table), _arrow),
    (pa.Schema, lambda packer, value, _: ["sc", packer.blob(value.serialize())]),
    (pa.DataType, lambda p, v, _: ["ty", p.blob(pa.schema([("", v)]).serialize())]),
    (pa.Scalar, lambda packer, value, depth: ["v", packer.down(value.as_py(), depth)]),
    ((pa.Array, pa.ChunkedArray), lambda p, v, depth: ["v", p.down(v.to_pylist(), depth)]),
    (Schema, lambda _, value, __: ["schema", value.to_json()]),
    (TxnToken, lambda packer, value, _: ["token", packer.blob(bytes(value))]),
    (type(arrow_input.MISSING), lambda _, __, ___: ["?", 0]),
    (BaseException, _Packer.error),
)


@cache
def _down_of(kind: type) -> Callable[[_Packer, Any, int], Tagged] | None:
    """Return what packs values of a class, where one of `_DOWN` does."""
    return next((down for known, down in _DOWN if issubclass(kind, known)), None)


class _Unpacker:
    def __init__(self, blobs: list[bytes | None], resolve: Resolve | None) -> None:
        self._blobs = blobs
        self._resolve = resolve

    def up(self, found: dict[str, Any]) -> Any:
        """Return what an object of JSON stands for; those in it are done."""
        if _TAG not in found:
            return found
        kind, content = found[_TAG]
        make = _UP.get(kind)
        if make is not None:
            return make(self, content)
        if self._resolve is None:
            raise ValueError(f"a message has a value of kind {kind!r}")
        return self._resolve(kind, content)

    def members(self, content: Any) -> Any:
        name, members = content
        kinds = _CLASSES if self._resolve is None else _FROM_GUESTS
        return kinds[name](**members)

    def blob(self, number: Any) -> bytes:
        if type(number) is not int or number < 0:
            raise ValueError(f"there is no part {number!r} of a message")
        found, self._blobs[number] = self._blobs[number], None
        if found is None:  # a small message would be many copies of it
            raise ValueError(f"part {number} of a message stands there twice")
        return found

    def table(self, number: Any) -> pa.Table:
        with pa.ipc.open_stream(self.blob(number)) as reader:
            found = reader.read_all()
        found.validate(full=True)  # offsets of anybody's point nowhere else
        return found

    def batch(self, number: Any) -> pa.RecordBatch:
        found = self.table(number).combine_chunks()
        batches = found.to_batches()
        if not batches:
            return pa.RecordBatch.from_pylist([], schema=found.schema)
        if len(batches) > 1:
            raise ValueError("a batch of a message is several")
        return batches[0]

    def schema(self, number: Any) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(self.blob(number)))


_UP: Final[dict[str, Callable[[_Unpacker, Any], Any]]] = {
    "v": lambda _, content: content,
    "t": lambda _, content: tuple(content),
    "m": lambda _, content: dict(content),
    "c": _Unpacker.members,
    "e": lambda _, content: _error(*content),
    "metrics": lambda _, content: MetricsSnapshot.of(*content),
    "b": _Unpacker.blob,
    "enc": lambda unpacker, number: Encoded(unpacker.blob(number)),
    "i": lambda _, content: _NUMBERS[content[0]](content[1]),
    "dt": lambda _, text: datetime.fromisoformat(text),
    "d": lambda _, text: date.fromisoformat(text),
    "tm": lambda _, text: time.fromisoformat(text),
    "td": lambda _, parts: timedelta(*parts),
    "u": lambda _, text: UUID(text),
    "n": lambda _, text: Decimal(text),
    "rb": _Unpacker.batch,
    "tb": _Unpacker.table,
    "sc": _Unpacker.schema,
    "ty": lambda unpacker, number: unpacker.schema(number).field(0).type,
    "x": lambda unpacker, number: pc.Expression._deserialize(pa.py_buffer(unpacker.blob(number))),
    "schema": lambda _, text: Schema.from_json(text),
    "token": lambda unpacker, number: TxnToken(unpacker.blob(number)),
    "?": lambda _, __: arrow_input.MISSING,
}


def _error(name: str, text: str, more: dict[str, Any]) -> Exception:
    kind = _ERRORS.get(name, TxnkvError)
    made: Exception
    if kind is RowErrors:
        made = RowErrors(*more["rows"])
    elif issubclass(kind, CommitOutcomeUnknownError):
        made = kind(text, TxnId(more["txn_id"]))
    elif "os" in more and issubclass(kind, OSError):
        made = kind(*more["os"])
    elif issubclass(kind, UnicodeError):
        made = ValueError(text)
    else:
        made = kind(text)
    for note in more["notes"]:
        made.add_note(str(note))
    return made


def ids_of(message: Any) -> Any:
    """Return the ids of a message or several, as an acknowledgement is sent; else what it is."""
    if isinstance(message, Message):
        return message.id
    if isinstance(message, MessageId):
        return message
    if isinstance(message, list | tuple):
        return [ids_of(each) for each in message]
    raise TypeError(
        "what is acknowledged is a Message, its MessageId or a list of them, not "
        f"{type(message).__name__}"
    )
