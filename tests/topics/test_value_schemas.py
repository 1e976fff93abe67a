"""Values of several schemas of one topic: what any of them wrote is read under the last one."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import txnkv
from tests import internals
from txnkv.errors import CorruptionError, SchemaError
from txnkv.storage import directory
from txnkv.storage.directory import StoreDirectory
from txnkv.topics import TopicEngine
from txnkv.topics.messages.values import ValueCodec, ValueStage, value_codec
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.transaction import ValueSchema, declared, evolved_values

FIRST = {"id": "int32", "note": "string?"}
SECOND = {
    "id": "int64",
    "note": "string?",
    "n": txnkv.Column("int16", default=7),
    "tags": "list<string>?",
}
THIRD = {**SECOND, "n": txnkv.Column("int32", nullable=True, default=8), "x": "float64?"}
OLD = {"id": 1, "note": "a"}
AS_SECOND = {**OLD, "n": 7, "tags": None}
AS_THIRD = {**AS_SECOND, "x": None}


def evolved(*schemas: ValueSchema) -> TopicOptions:
    """The options of a topic that had these schemas."""
    options = TopicOptions().with_values(declared(schemas[0]))
    for schema in schemas[1:]:
        options = options.with_values(evolved_values(schema)(options))
    return options


def codec_of(*schemas: ValueSchema) -> ValueCodec:
    codec = evolved(*schemas).codec
    assert codec is not None
    return codec


# -- the codec -------------------------------------------------------------------------

WIDER = {"int8": "int16", "int16": "int32", "int32": "int64", "float32": "float64"}
VALUES: dict[str, Any] = {
    "int8": st.integers(-128, 127),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "string": st.text(max_size=3),
    "list<int8>": st.lists(st.integers(0, 9), max_size=3),
}


@st.composite
def histories(draw: Any) -> list[dict[str, txnkv.Column]]:
    """Schemas of which each follows the one before."""

    def column() -> txnkv.Column:
        kind = draw(st.sampled_from(sorted(VALUES)))
        default = draw(st.none() | VALUES[kind])
        return txnkv.Column(kind, default is None or draw(st.booleans()), default)

    schemas = [{f"c{i}": column() for i in range(draw(st.integers(1, 3)))}]
    for number in range(draw(st.integers(0, 3))):
        after = {}
        for name, each in schemas[-1].items():
            assert isinstance(each.type, str)
            kind = draw(st.sampled_from([each.type, WIDER.get(each.type, each.type)]))
            default = draw(st.none() | VALUES[kind])
            after[name] = txnkv.Column(kind, each.nullable or draw(st.booleans()), default)
        for i in range(draw(st.integers(0, 2))):
            after[f"n{number}{i}"] = column()
        schemas.append(after)
    return schemas


def as_last(schemas: list[dict[str, txnkv.Column]], number: int, row: dict[str, Any]) -> Any:
    """A row of one of the schemas as the last one has it, by a plain reading of the rule."""
    found = dict(row)
    for schema in schemas[number + 1 :]:
        found |= {name: each.default for name, each in schema.items() if name not in found}
    return {name: found[name] for name in schemas[-1]}


@given(histories(), st.data())
def test_values_of_any_schema_are_read_under_the_last_one(
    schemas: list[dict[str, txnkv.Column]], data: Any
) -> None:
    codecs = [codec_of(*schemas[: number + 1]) for number in range(len(schemas))]
    last = pickle.loads(pickle.dumps(codecs[-1]))
    values: list[bytes | None] = []
    rows: list[dict[str, Any] | None] = []
    for _ in range(data.draw(st.integers(0, 6))):
        number = data.draw(st.integers(0, len(schemas) - 1))
        row = {
            name: data.draw(VALUES[str(c.type)] | st.none() if c.nullable else VALUES[str(c.type)])
            for name, c in schemas[number].items()
        }
        value = codecs[number].encode_one(list(row.values()))
        values.append(value)
        rows.append(None if value is None else as_last(schemas, number, row))
    for value, row in zip(values, rows, strict=True):
        if value is not None:
            assert last.decode_one(value) == row
    nothing = dict.fromkeys(schemas[-1])
    wanted = [nothing if row is None else row for row in rows]
    found = last.decode(pa.array(values, pa.binary()))
    found.validate(full=True)
    assert found.schema == last.columns
    assert found.to_pylist() == wanted
    name = data.draw(st.sampled_from(sorted(schemas[-1])))
    assert last.decode(pa.array(values, pa.binary()), [name]).to_pylist() == [
        {name: row[name]} for row in wanted
    ]


def test_a_value_of_a_schema_that_is_not_known_is_a_corruption() -> None:
    one, three = codec_of(FIRST), codec_of(FIRST, SECOND, THIRD)
    newest = three.encode_one([1, "a", 2, None, None])
    assert newest is not None
    two = codec_of(FIRST, SECOND)
    for codec in (one, two):
        with pytest.raises(CorruptionError, match=f"of schema 3, not {len(codec.stages)}"):
            codec.decode_one(newest)
    old = one.encode_one([1, "a"])
    with pytest.raises(CorruptionError, match=r"value 2 of 3 of schema .* it is of schema 3"):
        two.decode(pa.array([old, None, newest], pa.binary()))
    damaged = bytes(old or b"")[:-1] + b"\xff"
    with pytest.raises(CorruptionError, match=r"(?i)utf-?8"):
        two.decode(pa.array([damaged], pa.binary()))


def test_the_catalog_keeps_them_all() -> None:
    options = evolved(FIRST, SECOND, THIRD)
    assert [len(stage.schema) for stage in options.values] == [2, 4, 5]
    assert TopicOptions.from_json(options.to_json()) == options
    assert options.codec is not None
    assert options.codec.described == (
        "(id int64, note string?, n int32? = 8, tags list<item: string>?, x double?)"
    )
    # As every topic has it whose schema never changed.
    text = (
        '{"value_schema": {"id": 1, "columns": ['
        '{"name": "id", "type": "int32", "nullable": false},'
        ' {"name": "note", "type": "string", "nullable": true}]}}'
    )
    of_old = TopicOptions.from_json(text)
    assert of_old == TopicOptions().with_values(declared(FIRST))
    assert json.loads(of_old.to_json())["value_schema"] == json.loads(text)["value_schema"]


WRONG: list[tuple[Any, str]] = [
    ({"id": "int32"}, "column 'note' is not in the new value schema"),
    ({"id": "int32", "note": "string"}, "it stays nullable"),
    ({"id": "int16", "note": "string?"}, "not all its values are int16"),
    ({"id": "string", "note": "string?"}, "not all its values are string"),
    ({**FIRST, "n": "int32"}, "make it nullable"),
    ({**FIRST, "key": "int32?"}, "Take another name"),
    ({**FIRST, "n": txnkv.Column("int8", default=300)}, "the default of"),
]


@pytest.mark.parametrize(("schema", "said"), WRONG)
def test_what_would_lose_values_is_refused(
    client: txnkv.Client, schema: ValueSchema, said: str
) -> None:
    topic = client.create_topic("t", value_schema=FIRST)
    with pytest.raises(SchemaError, match=said):
        topic.alter(value_schema=schema)
    assert topic.info.options == client.topic("t").info.options == evolved(FIRST)
    assert internals.store(client).directory.features == []
    plain = client.create_topic("plain")
    with pytest.raises(SchemaError, match="are bytes"):
        plain.alter(value_schema=FIRST)


def test_arrow_says_nothing_of_defaults() -> None:
    options = evolved(FIRST, SECOND)
    assert options.value_schema is not None
    wider = options.value_schema.append(pa.field("more", pa.int8()))
    assert evolved(FIRST, SECOND, wider).values[-1].by_column == {"n": 7}
    plain = {**SECOND, "n": "int16"}
    assert evolved(FIRST, SECOND, plain).values[-1].by_column == {}
    assert evolved(FIRST, SECOND, SECOND) == options


# -- topics ----------------------------------------------------------------------------


@pytest.fixture(params=["marker", "sidecar"])
def topic(client: txnkv.Client, request: pytest.FixtureRequest) -> txnkv.Topic:
    """A topic with a message of the first schema."""
    topic = client.create_topic("t", buffer=request.param, value_schema=FIRST)
    with client.transaction() as txn:
        txn.send(topic, OLD, key="k")
    return topic


def read(topic: txnkv.Topic) -> list[Any]:
    """All values, as both ways to read give them."""
    with topic.consumer() as consumer:
        rows = consumer.poll_batch(timeout=0)
    with topic.consumer() as consumer:
        values = [message.value for message in consumer.poll(timeout=0)]
    assert topic.value_schema is not None
    names = topic.value_schema.names
    nothing = dict.fromkeys(names)
    assert rows.select(names).to_pylist() == [value or nothing for value in values]
    return values


def test_readers_and_writers_of_before_go_on(
    client: txnkv.Client, topic: txnkv.Topic, connect: Callable[..., txnkv.Client]
) -> None:
    elsewhere = connect().topic("t")
    subscription = topic.subscribe("s")
    with elsewhere.consumer() as consumer, client.new_session() as session:
        session.send(topic, {"id": 2})
        elsewhere.alter(value_schema=SECOND)  # as another process does
        session.send(topic, {"id": 3, "n": 9})
        session.send(topic, {"id": 1 << 40})
        session.send(topic, None)
        session.flush()
        internals.flush(client)
        wanted = [
            AS_SECOND,
            {"id": 2, "note": None, "n": 7, "tags": None},
            {"id": 3, "note": None, "n": 9, "tags": None},
            {"id": 1 << 40, "note": None, "n": 7, "tags": None},
            None,
        ]
        assert [message.value for message in consumer.poll(timeout=0)] == wanted
        found = subscription.receive_many(timeout=0)
        assert [message.value for message in found] == wanted
        subscription.close()
    topic.alter(value_schema=THIRD)
    assert topic.value_schema == elsewhere.value_schema
    assert read(topic)[0] == AS_THIRD
    assert client.check().ok


def test_rows_of_nothing_but_nulls_are_no_values_whatever_has_a_default(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    topic.alter(value_schema={**FIRST, "n": txnkv.Column("int16", default=7)})
    with client.transaction() as txn:
        txn.send_batch(topic, pa.table({"id": pa.array([2, None], pa.int32()), "key": ["a", "b"]}))
    with topic.consumer() as consumer:
        values = [message.value for message in consumer.poll(timeout=0)]
    assert values[1:] == [{"id": 2, "note": None, "n": 7}, None]
    loose = client.create_topic("loose", value_schema={"a": "int8?"})
    loose.alter(value_schema={"a": "int8?", "n": txnkv.Column("int16", default=7)})
    with client.transaction() as txn:
        txn.send(loose, {"a": None})
        txn.send(loose, {"a": 1})
        txn.send(loose, (None, 7))
        txn.send(loose, {})
    with loose.consumer() as consumer:
        values = [message.value for message in consumer.poll(timeout=0)]
    assert values == [None, {"a": 1, "n": 7}, {"a": None, "n": 7}, {"a": None, "n": 7}]


def test_a_message_in_hand_is_read_by_the_schema_of_its_time(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race: a reader has looked at the topic, it is altered and sent to, the reader reads."""
    consumer = topic.consumer()
    gather = type(consumer)._gather

    def altered_before(self: Any, most: int) -> Any:
        monkeypatch.undo()
        self._follow()
        client.topic("t").alter(value_schema=SECOND)
        with client.transaction() as txn:
            txn.send("t", {"id": 2, "n": 1})
        follow = self._follow
        self._follow = lambda: self._readers  # it looked before
        try:
            return gather(self, most)
        finally:
            self._follow = follow

    monkeypatch.setattr(type(consumer), "_gather", altered_before)
    values = [message.value for message in consumer.poll(timeout=0)]
    assert values == [AS_SECOND, {"id": 2, "note": None, "n": 1, "tags": None}]


def test_producers_and_arrow(client: txnkv.Client, topic: txnkv.Topic) -> None:
    with topic.producer("p") as producer:
        producer.send({"id": 2}).result(5)
        client.topic("t").alter(value_schema=SECOND)
        producer.send({"id": 3, "tags": ["x"]}).result(5)
        with pytest.raises(SchemaError):
            producer.send({"id": 3, "nothing": 1})
    with client.transaction() as txn:
        txn.send_batch("t", pa.table({"id": pa.array([4], pa.int8())}))
    assert [(row["id"], row["n"], row["tags"]) for row in read(topic)] == [
        (1, 7, None), (2, 7, None), (3, 7, ["x"]), (4, 7, None),
    ]  # fmt: skip


def test_dead_letters_follow(client: txnkv.Client, topic: txnkv.Topic) -> None:
    sub = topic.subscribe("d", "shared", max_deliveries=1)
    topic.alter(value_schema=SECOND)
    letters = client.topic("t.d.dead")
    assert letters.info.options.values == topic.info.options.values
    with client.transaction() as txn:
        txn.send(topic, {"id": 2, "n": 1, "tags": ["x"]})
    for message in sub.receive_many(timeout=0):
        sub.nack(message)
    assert sub.receive(timeout=0) is None
    assert read(letters) == [AS_SECOND, {"id": 2, "note": None, "n": 1, "tags": ["x"]}]
    # One that went its own way is given rows of its columns.
    letters.alter(value_schema={**SECOND, "own": txnkv.Column("int8", default=5)})
    topic.alter(value_schema={**SECOND, "n": txnkv.Column("int32", default=7)})
    assert len(letters.info.options.values) == 3
    with client.transaction() as txn:
        txn.send(topic, {"id": 3})
    for message in sub.receive_many(timeout=0):
        sub.nack(message)
    assert sub.receive(timeout=0) is None
    assert read(letters)[-1] == {"id": 3, "note": None, "n": 7, "tags": None, "own": 5}
    sub.close()


def test_a_copy_has_them(client: txnkv.Client, topic: txnkv.Topic, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    txnkv.replicate(client, copy)
    topic.alter(value_schema=SECOND)
    with client.transaction() as txn:
        txn.send(topic, {"id": 2, "n": 1})
    internals.flush(client)
    txnkv.replicate(client, copy)
    with txnkv.connect(copy) as follower:
        found = follower.topic("t")
        assert found.info.options.values == topic.info.options.values
        assert read(found) == read(topic)
    txnkv.replicate(client, tmp_path / "anew")
    assert StoreDirectory.open(tmp_path / "anew").features == ["value_schemas"]


def test_a_dump_has_the_last_one(client: txnkv.Client, topic: txnkv.Topic, tmp_path: Path) -> None:
    topic.alter(value_schema=SECOND)
    with client.transaction() as txn:
        txn.send(topic, {"id": 2, "n": 1})
    wanted = read(topic)
    client.close()
    txnkv.dump(client.path, tmp_path / "dump")
    txnkv.restore(tmp_path / "dump", tmp_path / "made")
    with txnkv.connect(tmp_path / "made") as made:
        again = made.topic("t")
        assert read(again) == wanted
        assert [stage.by_column for stage in again.info.options.values] == [{"n": 7}]
        with made.transaction() as txn:
            txn.send(again, {"id": 3})
        assert read(again)[-1]["n"] == 7


def test_versions_that_do_not_know_them_refuse_the_store(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.alter(compression="lz4")
    assert internals.store(client).directory.features == []
    topic.alter(value_schema=SECOND)
    client.close()
    with monkeypatch.context() as patch:
        patch.setattr(directory, "KNOWN_FEATURES", frozenset())
        with pytest.raises(txnkv.IncompatibleStoreError, match="value_schemas"):
            txnkv.connect(client.path)
    with txnkv.connect(client.path) as again:
        assert read(again.topic("t")) == [AS_SECOND]


def test_stages_are_compared_with_their_defaults() -> None:
    schema = pa.schema([("n", pa.int8())])
    one, two = ValueStage.of(schema, {"n": 1}), ValueStage.of(schema, {"n": 2})
    assert value_codec(one) is not value_codec(two)
    value = value_codec(one).encode_one([3])
    assert value is not None
    assert value_codec(one, two).has(value, value_codec(one))
    assert not value_codec(two).has(value, value_codec(one))


# -- evolve ----------------------------------------------------------------------------


def test_evolve_makes_a_topic_or_gives_it_the_schema(client: txnkv.Client) -> None:
    for schema, wanted in ((FIRST, OLD), (SECOND, AS_SECOND), (SECOND, AS_SECOND)):
        topic = client.create_topic("t", 2, value_schema=schema, evolve=True)
        with client.transaction() as txn:
            txn.send(topic, OLD, partition=0)
        assert {str(value) for value in read(topic)} == {str(wanted)}
    assert topic.info.options == client.topic("t").info.options
    assert len(topic.info.options.values) == 2
    assert client.create_topic("t", 2, value_schema=SECOND, exists_ok=True).info == topic.info
    plain = client.create_topic("plain", evolve=True)
    assert client.create_topic("plain", evolve=True).info == plain.info


@pytest.mark.parametrize(("schema", "said"), WRONG[:5])
def test_evolve_names_what_is_not_safe(
    client: txnkv.Client, schema: ValueSchema, said: str
) -> None:
    topic = client.create_topic("t", value_schema=FIRST)
    with pytest.raises(txnkv.TopicExistsError, match=said):
        client.create_topic("t", value_schema=schema, evolve=True)
    with pytest.raises(txnkv.TopicExistsError, match="its partitions is 1, not 2"):
        client.create_topic("t", 2, value_schema=SECOND, evolve=True)
    with pytest.raises(txnkv.TopicExistsError, match="its value_schema is"):
        client.create_topic("t", evolve=True)
    assert client.topic("t").info == topic.info
    client.create_topic("plain")
    with pytest.raises(txnkv.TopicExistsError, match="are bytes"):
        client.create_topic("plain", value_schema=FIRST, evolve=True)


def test_evolve_of_a_topic_that_is_dropped_meanwhile_makes_it(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process drops it between the look at it and its change."""
    client.create_topic("t", value_schema=FIRST)
    alter = TopicEngine.alter

    def drop_first(engine: TopicEngine, topic: Any, *rest: Any) -> Any:
        client.drop_topic("t")
        return alter(engine, topic, *rest)

    monkeypatch.setattr(TopicEngine, "alter", drop_first)
    assert client.create_topic("t", value_schema=SECOND, evolve=True).info.options == evolved(
        SECOND
    )


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("json", '{"a":1}'), ("uuid", UUID(int=7)), ("list<int8>", [1, None]), ("bool", True),
        ("decimal128(9, 2)", Decimal("1.50")), ("string", "x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nullable", [True, False])
def test_a_new_column_of_any_type_is_read_of_former_messages(
    client: txnkv.Client, kind: str, default: Any, nullable: bool
) -> None:
    topic = client.create_topic("e", value_schema={"a": "int64"})
    with client.transaction() as txn:
        txn.send(topic, {"a": 1})
        txn.send(topic, None)
    column = kind + "?" if nullable else txnkv.Column(kind, default=default)
    topic.alter(value_schema={"a": "int64", "n": column})
    with client.transaction() as txn:
        txn.send(topic, {"a": 2, "n": default})
    with topic.consumer() as consumer:
        values = consumer.poll_batch(timeout=0).select(["a", "n"]).to_pylist()
        first = None if nullable else default
        assert values == [{"a": 1, "n": first}, {"a": None, "n": None}, {"a": 2, "n": default}]
    assert client.check().problems == []
