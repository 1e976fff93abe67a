"""Each public method answers over a server what it answers over the folder: a value, or an error of
the same class.

One script runs on two stores, line by line. What differs from store to store by nature (ids, times)
is compared by its type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa

import txnkv
from txnkv.server import Server

from .test_twins import INSIDE, TWINS

SCRIPT = """
c.create_table("t", SCHEMA)
t = c.create_table("t", SCHEMA, exists_ok=True)
c.create_table("t", SCHEMA)
c.create_table("", SCHEMA)
c.create_topic("e", 2, retention_seconds=3600.0)
e = c.topic("e")
c.topic("nope")
c.table("nope")
c.tables()
c.topics()
c.path != ""
c.create_index(t, "v")
c.create_index(t, "nope")
c.create_table("u", SCHEMA)
c.rename_table("u", "w")
c.rename_table("w", "t")
c.drop_table("w", keep=60.0)
c.recall_table("w")
c.drop_table("w")
c.drop_table("w")
c.drop_table("w", missing_ok=True)
c.create_topic("g")
c.drop_topic("g")
c.drop_topic("g")
c.table_info("t").name
c.table_info("t").id > 0
c.table_info("t").schema
c.topic_info("e").name
c.topic_info("e").id > 0

t.insert({"id": 1, "v": "a"})
t.insert((2, "b"))
t.insert((2, "b"))
t.insert({"id": "x"})
t.insert({"nope": 1})
t.upsert((3, None))
t.update({"id": 3, "v": "c"})
t.update({"id": 30, "v": "c"})
t.delete(2)
t.delete(2)
t.get(1)
t.get(2)
t.get("x")
t.get((1,))
t.get_by("v", "a")
t.get_by("id", 1)
t.get_by("nope", 1)
t.get_many([3, 1, 2])
t.get_many([])
t.count()
t.count([("id", ">", 1)])
t.count("id")
t.indexes
t.history
t.name
t.schema
t.next_id()
t.next_id()
t.alter(add={"n": "int64?"})
t.alter(drop=["nope"])
c.create_table("aging", Schema({"id": "int64", "at": "timestamp[us]?"}, primary_key=["id"]))
x = c.table("aging")
x.alter(ttl=("at", 3600)).ttl
x.schema.ttl
x.alter(ttl=None).ttl
c.drop_table("aging", keep=float("inf"))
c.drop_table("aging")
t.dataset().to_table()
before = c.snapshot().timestamp
c.timestamp_of(before) == before
c.timestamp_of(NOW + DAY)
t.upsert((1, "new", 5))
t.diff(before).read_all().drop_columns(["_commit_timestamp"])
t.diff(before, columns=["nope"])
[type(token) for token in t.diff_tokens(before)]
t.restore(before)
t.get(1)
t.close()

n = t.scan(["id"], [("v", "=", "a")], ordered=True, limit=2)
n.schema
n.snapshot
n.to_arrow()
[batch.num_rows for batch in n.to_batches()]
n.to_pandas().to_dict()
[type(token) for token in n.tokens()]
len(n.tokens(0))
n.close()
t.scan(["nope"])
t.scan(where="nope")
t.scan(limit=-1)
t.scan(snapshot=NOW + DAY).to_arrow()

k = c.snapshot()
k.timestamp
k.get("t", 1)
k.get("nope", 1)
k.get_by("t", "v", "a")
k.get_many("t", [1])
k.scan("t", ["id"]).to_arrow()
k.require_open()
k.close()
k.close()
k.require_open()
k.get("t", 1)
c.snapshot(NOW + DAY)

x = c.transaction()
x.id
x.state
x.age
x.snapshot
x.insert(t, (10, "x", 1))
x.insert_ignore(t, (10, "y", 1))
x.insert_ignore("nope", (10, "y", 1))
x.upsert(t, (11, "x", 1))
x.update(t, {"id": 11, "v": "z"})
x.update_ignore(t, {"id": 99, "v": "z"})
x.delete(t, 11)
x.delete_ignore(t, 99)
x.get(t, 10)
x.get_by(t, "v", "x")
x.get_many(t, [10, 11])
x.scan(t, ["id"]).to_arrow()
x.write(t, pa.table({"id": [20, 21], "v": ["w", "w"], "n": [1, 2]}))
x.write(t, pa.table({"nope": [20]}))
x.write(t, pa.table({"id": [20]}), "nope")
x.send(e, b"one", "key")
x.send("e", b"two", partition=1)
x.send("e", b"two", partition=7)
x.send_batch(e, pa.table({"value": [b"three", b"four"], "partition": [0, 0]}))
x.flush()
x.pending_errors()
x.mark_applied("app", 3)
x.is_commit_complete()
y = x.new_session()
y.insert(t, (12, "s", 1))
y.has_pending
y.flush_mode
y.txn_id
y.upsert(t, (13, "s", 1))
y.flush()
y.update(t, {"id": 13, "v": "u"})
y.insert_ignore(t, (13, "no", 1))
y.update_ignore(t, {"id": 99, "v": "z"})
y.delete_ignore(t, 99)
y.delete(t, 13)
y.insert(t, (10, "twice", 1))
y.flush()
y.pending_errors()
y.pending_errors()
y.send(e, b"five", partition=0)
y.send_batch(e, pa.table({"value": [b"six"], "partition": [1]}))
y.send_batch(e, pa.table({"nope": [b"six"]}))
y.write(t, pa.table({"id": [22], "v": ["w"], "n": [1]}), op="upsert")
y.waiting()
y.flush_untold()
y.flush_for_commit()
y.insert(t, (14, "s", 1))
y.discard()
y.close()
y.close()
y.insert(t, (14, "s", 1))
type(x.serialize())
x.commit()
x.commit()
x.state
x.is_commit_complete()
x.insert(t, (40, "late", 1))
x.get(t, 1)
x.rollback()
x.close()
z = c.new_transaction(timeout=5.0, isolation="serializable")
z.insert(t, (10, "there", 1))
z.flush()
z.rollback()
z.rollback()
z.state
z.commit()
c.new_transaction(timeout=-1.0)
c.new_transaction(isolation="nope")
q = c.transaction()
q.upsert(t, (15, "q", 1))
q.commit_async()
q = c.transaction()
q.upsert(t, (15, "q", 2))
q.start_commit()
type(q.serialize())
q.start_commit()
q.commit()
c.transaction_state(q.id)
c.transaction_state(q.id + 1000)
c.transaction_state(int(q.id) ^ 1 << 112)
c.transaction_state(float(q.id.local))
c.abort_transaction(True)
c.keep_transaction_alive(q.id)
c.abort_transaction(q.id)
c.applied("app")
c.applied("nope")
c.applications()
c.forget_applied("app")
c.forget_applied("app")
sorted({info.state.name for info in c.transactions()})
c.run(lambda txn: txn.insert("t", (16, "r", 1)))
c.run(lambda txn: 17)
c.run(lambda txn: txn.insert("t", (16, "r", 1)))
c.outcome(q.id)
r = c.new_session()
r.insert(t, (17, "r", 1))
r.insert(t, (16, "r", 1))
r.flush()
r.pending_errors()
r.txn_id
r.close()

e.name
e.buffer
e.value_schema
e.options
e.partitions
e.end_offsets().keys()
e.last_stable_offsets().keys()
e.fetch(1, 0).high_watermark
e.fetch(7, 0)
e.subscriptions()
e.close()
e.alter(retention_bytes=1_000_000)
v = c.create_topic("v", value_schema={"n": "int8"})
w = v.consumer()
c.new_session().send(v, {"n": 1, "m": 2})
v.alter(value_schema={"n": "int8?", "m": Column("int16", default=5)})
v.alter(value_schema={"m": "int16"})
v.value_schema
c.create_topic("v", value_schema={"n": "int16?", "m": Column("int16")}, evolve=True).value_schema
c.create_topic("v", value_schema={"n": "int8?", "m": Column("int16")}, evolve=True)
y = c.new_session()
y.send("v", {"n": 1})
y.send(v, {"n": None, "m": 3})
y.send(v, {"n": None, "m": None})
y.flush()
y.close()
[m.value for m in w.poll(timeout=5)]
w.close()
[m.value for m in v.subscribe("s").receive_many(timeout=5)]
v.close()
e.alter(nope=1)
e.alter(partitions=1)
o = e.consumer(partitions=[1], start="earliest")
o.partitions
o.position(1)
o.position(0)
o.lag()
o.lag(1)
o.lag(0)
o.poll(max_messages=1, timeout=5.0)
o.position(1)
o.unpoll()
o.position(1)
o.poll_batch(max_messages=1, timeout=5.0)["value"]
o.seek(1, 0)
o.seek(0, 0)
o.seek(1, -5)
o.seek_to_time(NOW - DAY)
o.position(1)
o.seek_to_time(NOW + DAY)
o.poll(timeout=0.0)
o.close()
o.close()
o.poll(timeout=0.0)
a = c.consumer(e, group="q")
len(a.poll(max_messages=9, timeout=0.0))
a.partitions
a.commit()
a.committed()
a.close()
c.create_topic("gone")
g = c.consumer("gone", group="q")
c.drop_topic("gone")
c.create_topic("gone")
g.poll(timeout=0.0)
c.table("group_members").count()
c.drop_topic("gone")
c.consumer("nope", group="q")
c.consumer(e, group="")
c.drop_table("group_members")
c.drop_table("kafka_offsets")
e.consumer(order="nope")
e.consumer(start={5: 0})
b = e.subscribe("sub", "shared")
b.name
b.is_active
b.lag().keys()
b.committed()
b.lost()
m = b.receive(5.0)
b.ack(m)
b.ack("nope")
m = b.receive_many(1, 5.0)
b.nack(m)
b.unreceive()
b.seek(1, "latest")
b.seek(1, "nope")
b.seek(9, 0)
b.ack_cumulative(m)
b.close()
b.close()
b.receive(0.0)
b = e.subscribe("own", "exclusive")
m = b.receive(5.0)
b.ack_cumulative(m)
w = c.transaction()
m = b.receive(5.0)
w.ack(b, m)
w.ack_cumulative(b, b.receive(5.0))
w.commit()
e.subscribe("own", "exclusive")
w = c.transaction()
y = w.new_session()
y.ack(b, b.receive(5.0))
y.ack_cumulative(b, "nope")
y.ack_cumulative(b, b.receive(5.0))
y.flush()
w.rollback()
b.close()
e.subscriptions()
e.drop_subscription("own")
e.drop_subscription("own")
e.drop_subscription("own", missing_ok=True)
e.subscribe("sub", "nope")
p = e.producer("me", linger=0.0)
p.name
p.send(b"p", key="k", headers={"h": b"1"})
p.send(17)
p.flush()
p.sent
p.hurry(1.0)
p.close()
p.close()
p.send(b"late")
e.truncate({0: 0})
e.truncate({1: 1})
e.truncate(-1)
e.truncate()
e.truncate({0: 0}, after={0: 0})
e.truncate(after={0: "x"})
e.truncate(after={0: 1000})
e.truncate(after={0: -1})
e.end_offsets()

c.check().problems
type(c.compact())
type(c.stats())
type(c.metrics())
c.repair_clock()
c.require_open()
c.require_writable()
c.close()
c.close()
c.require_open()
c.require_writable()
c.tables()
t.get(1)
e.end_offsets()
x = c.transaction()
"""

OTHERWISE = {
    "Client": "accept_loss attempts backup drop_index require_own retries",
    "Scan": "to_polars",
    "Session": "begin_anew end",
    "Transaction": "begin deserialize drop",
}
"""Methods that other tests call over both, or that are made of such."""


VALUES = """
t = c.create_table(Place.EU, SCHEMA)
t.insert({"id": 1, "v": Place.EU, "at": datetime(2026, 1, 1), "x": 1.5})
t.insert({"id": 2, "v": Place.US, "x": -1.0})
c.tables()
t.get_by("v", "eu")
t.scan(where=[("v", "=", Place.EU)], ordered=True).to_arrow()
t.scan(where=[("v", "!=", Place.EU)], ordered=True).to_arrow()
t.count([("v", "in", [Place.EU, Place.US])])
t.count([("v", "in", dict.fromkeys([Place.EU]).keys())])
t.count([("id", "in", pa.array([1, 3]))])
t.count([("id", "in", pa.chunked_array([[1], [2]]))])
t.count([("at", "=", np.datetime64("2026-01-01T00:00:00.000000", "us"))])
t.count([("at", "=", np.datetime64("2026-01-01T00:00:00.000000", "ns"))])
t.count([("at", ">=", np.datetime64("2026-01-01T00:00:00.000000", "ns"))])
t.count([("at", "in", np.array(["2026-01-01"], "M8[ns]"))])
t.count([("id", ">", np.datetime64("2026-01-01", "ns"))])
t.count([("at", "=", pa.scalar(datetime(2026, 1, 1), pa.timestamp("us")))])
t.count([("at", "=", pa.scalar(datetime(2026, 1, 1), pa.timestamp("ns")))])
t.count([("at", "=", pa.scalar(2**60, pa.timestamp("us")))])
t.count([("id", "=", pa.scalar(1))])
t.count([("id", "=", pa.scalar(1, pa.int8()))])
t.count([("x", "=", np.uint64(2**64 - 1))])
t.upsert({"id": 3, "x": np.uint64(2**64 - 1)})
t.upsert({"id": 3, "x": np.uint64(7)})
t.upsert({"id": 3, "l": [np.uint64(2**64 - 1)]})
t.upsert({"id": 3, "l": np.array([2**64 - 1], np.uint64)})
t.upsert({"id": 3, "l": np.array([2, 3], np.uint64)})
t.get_many([3])
t.get(pa.scalar(1))
t.get_many(pa.array([1, 2]))

with_data(c, categories)
with_data(c, pa.table({"id": [7], "v": pa.array(["a"], pa.string_view()).dictionary_encode()}))
with_data(c, pa.table({"id": [8], "v": wrong_text}))
with_data(c, large(pa.table({"id": [8], "v": wrong_text})))
with_data(c, pa.table({"id": [8, 9], "v": wrong_ends}))
with_data(c, large(pa.table({"id": [8, 9], "v": wrong_ends})))
with_data(c, pa.table({"id": [8, 9], "l": wrong_list}))
with_data(c, large(pa.table({"id": [8, 9], "l": wrong_list})))
with_data(c, pa.table({"id": [8], "v": wrong_index}))
with_data(c, pa.table({"id": [8], "at": wrong_day}))
with_data(c, large(pa.table({"id": [8], "at": wrong_day})))
with_data(c, pa.table({"id": [8], "v": union}))
with_data(c, large(pa.table({"id": [8], "v": union})))
with_data(c, pa.table({"id": [8], "l": pa.ListArray.from_arrays([0, 1], union)}))
with_data(c, pa.table({"id": [8], "v": pa.ExtensionArray.from_storage(Own(), pa.array(["a"]))}))
[t.scan(ordered=of).to_arrow() for of in ("descending", "v", ["-v", "id"])]

c.create_topic(Place.US)
c.topics()
s = c.topic(Place.US).subscribe(Place.EU)
s.name
c.topic(Place.US).subscriptions()
c.topic(Place.US).drop_subscription(Place.EU)
c.consumer(Place.US, group=Place.EU).poll(timeout=0)
c.drop_topic(Place.US)
c.drop_table(Place.EU)
"""
"""Values of other libraries, Enums that are texts, and Arrow data that no reader takes."""


def test_the_same_answers(tmp_path: Path) -> None:
    names = _run(SCRIPT, tmp_path, {})
    _require_all(names)


def test_the_same_answers_of_values(tmp_path: Path) -> None:
    _run(VALUES, tmp_path, _value_names())


def _run(script: str, tmp_path: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Run a script here and there; the names of the first."""
    now = datetime.now(UTC)
    with ExitStack() as stack:
        here = stack.enter_context(txnkv.connect(tmp_path / "here"))
        stack.enter_context(txnkv.connect(tmp_path / "there"))
        server = Server(str(tmp_path / "there"), "grpc://127.0.0.1:0")
        stack.callback(server.close)
        there = stack.enter_context(txnkv.connect(f"grpc://127.0.0.1:{server.port}"))
        both = [_names(client, now) | more for client in (here, there)]
        differs = []
        for line in filter(None, script.splitlines()):
            one, other = (_answer(line, names) for names in both)
            if one != other:
                differs.append(f"{line}\n    here  {one!r}\n    there {other!r}")
    assert not differs, "\n".join(differs)
    return both[0]


def _names(client: txnkv.Client, now: datetime) -> dict[str, Any]:
    types = {"id": "int64", "v": "string?"}
    names = {"NOW": now, "DAY": timedelta(days=1), "Column": txnkv.Column, "Schema": txnkv.Schema}
    return {"c": client, "pa": pa, "SCHEMA": txnkv.Schema(types, primary_key=["id"]), **names}


Place = Enum("Place", {"EU": "eu", "US": "us"}, type=str)
"""Texts whose `str` is another one, unlike those of a StrEnum."""


class Own(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.string(), "tests.own")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, data: bytes) -> Own:
        return cls()


def _value_names() -> dict[str, Any]:
    types = {"id": "int64", "v": "string?", "at": "timestamp[us]?", "x": "float64?"}
    types["l"] = "list<float64>?"
    one = pa.py_buffer(np.array([0, 1], np.int32).tobytes())
    far = pa.py_buffer(np.array([0, 50, 1], np.int32).tobytes())
    byte = pa.py_buffer(b"\xff")
    return {
        "SCHEMA": txnkv.Schema(types, primary_key=["id"]),
        "Place": Place, "Own": Own, "np": np, "datetime": datetime, "with_data": _with_data,
        "large": lambda data: pa.RecordBatchReader.from_batches(data.schema, data.to_batches()),
        "categories": polars.DataFrame({"id": [5], "v": ["a"]}).with_columns(
            polars.col("v").cast(polars.Categorical)
        ),
        "wrong_text": pa.StringArray.from_buffers(1, one, byte),
        "wrong_ends": pa.StringArray.from_buffers(2, far, byte),
        "wrong_list": pa.Array.from_buffers(
            pa.list_(pa.float64()), 2, [None, far], children=[pa.array([1.0])]
        ),
        "wrong_index": pa.DictionaryArray.from_arrays(pa.array([3]), pa.array(["a"]), safe=False),
        "wrong_day": pa.array([1], pa.int64()).cast(pa.date64()),
        "union": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
    }  # fmt: skip


def _with_data(client: txnkv.Client, data: Any) -> None:
    client.run(lambda txn: txn.write("eu", data, op="upsert"))


def _answer(line: str, names: dict[str, Any]) -> Any:
    """Run a line; what it gives, as far as that is the same in every store."""
    name, does, right = line.partition(" = ")
    keep, line = (name, right) if does and name.isidentifier() else ("", line)
    try:
        found = eval(line, names)
        if isinstance(found, Future):
            found = found.result(30)
    except NameError:
        raise
    except Exception as error:
        return "SchemaError" if isinstance(error, txnkv.SchemaError) else type(error).__name__
    if keep:
        names[keep] = found
    return _plain(found)


_TWIN = {kind: here.__name__ for here, there in TWINS for kind in (here, there)}


def _plain(value: Any) -> Any:
    kind = next((_TWIN[each] for each in type(value).__mro__ if each in _TWIN), None)
    if kind is not None:
        return kind
    if isinstance(value, txnkv.Timestamp | datetime) or type(value).__name__ == "TxnId":
        return type(value).__name__
    if isinstance(value, Exception | txnkv.GroupConsumer):
        return type(value).__name__
    if isinstance(value, txnkv.Message):
        return "Message", value.partition, value.offset, value.key, value.value, value.headers
    if isinstance(value, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray):
        return type(value).__name__, getattr(value, "schema", None), value.to_pylist()
    if isinstance(value, Mapping):
        return type(value).__name__, {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value).__name__, [_plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, _plain(asdict(value))
    if hasattr(value, "_fields"):
        return type(value).__name__, _plain(value._asdict())
    if type(value).__name__ == "dict_keys":
        return sorted(value)
    return value


def _require_all(names: dict[str, Any]) -> None:
    kinds = {name: _plain(value) for name, value in names.items() if len(name) == 1}
    called: dict[str, set[str]] = {}
    for name, method in re.findall(r"\b([a-z])\.(\w+)", SCRIPT):
        called.setdefault(str(kinds.get(name)), set()).add(method)
    for here, _ in TWINS:
        if here.__name__ in ("Job", "Planning"):
            continue  # Spark's, whose tests run over both
        public = {name for name in dir(here) if not name.startswith("_")}
        left = " ".join((INSIDE.get(here.__name__, ""), OTHERWISE.get(here.__name__, ""))).split()
        assert public - set(left) <= called.get(here.__name__, set()), here.__name__
