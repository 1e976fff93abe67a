"""`txnkv produce, consume, topics` of a topic with a value schema."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import txnkv
from txnkv.cli.message_lines import lines_of

COLUMNS = (
    "id:int64,ok:bool?,x:float64?,day:date32?,at:timestamp[us, tz=UTC]?,local:timestamp[us]?,"
    "price:decimal128(9, 2)?,raw:binary?,tags:list<item: string>?,days:list<item: date32>?"
)
VALUE = {
    "id": 7,
    "ok": True,
    "x": 0.5,
    "day": date(2026, 1, 31),
    "at": datetime(2026, 1, 31, 12, tzinfo=UTC),
    "local": datetime(2026, 1, 31, 12, 0, 0, 1),
    "price": Decimal("9.50"),
    "raw": b"\x00\xff",
    "tags": ["a", None, "ü"],
    "days": [date(2026, 1, 1)],
}
LINE = {
    **VALUE,
    "day": "2026-01-31",
    "at": "2026-01-31T12:00:00+00:00",
    "local": "2026-01-31T12:00:00.000001",
    "price": "9.50",
    "raw": "AP8=",
    "days": ["2026-01-01"],
}
NOTHING = dict.fromkeys(VALUE)


@pytest.fixture
def typed(store, run):
    run("produce", store, "t", "--partitions", 2, "--value-schema", COLUMNS, input="")
    return store


def values(store, topic="t"):
    with txnkv.connect(store) as client, client.topic(topic).consumer() as consumer:
        return [message.value for message in consumer.poll(timeout=0)]


def test_lines_of_objects_in_and_out(typed, run):
    lines = f'{json.dumps(LINE)}\n\n{{"id": 8}}\nnull\n'
    assert run("produce", typed, "t", "-p", 0, input=lines).out == "sent 3 messages to t\n"
    assert values(typed) == [VALUE, {**NOTHING, "id": 8}, None]
    out = run("consume", typed, "t").out
    assert [json.loads(line) for line in out.splitlines()] == [LINE, {**NOTHING, "id": 8}, None]
    with txnkv.connect(typed) as client:
        schema = client.topic("t").value_schema
        client.create_topic("copy", value_schema=schema)
    run("produce", typed, "copy", input=out)
    assert values(typed, "copy") == values(typed)


@given(
    st.lists(
        st.none()
        | st.fixed_dictionaries(
            {
                "id": st.integers(-(2**63), 2**63 - 1),
                "x": st.none() | st.integers(-9, 9).map(lambda number: number / 2),
                "value": st.none() | st.text(max_size=9),  # which is a column here
                "day": st.none() | st.dates(),
                "at": st.none() | st.datetimes(timezones=st.just(UTC)),
                "raw": st.none() | st.binary(max_size=9),
                "tags": st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
                "doc": st.none() | st.sampled_from(["[1, 2]", '{"a": null}', "null"]),
            }
        ),
        max_size=6,
    ),
    st.sampled_from([(None, True), (b"=", False), (None, False)]),
)
@settings(max_examples=40, deadline=None)
def test_lines_by_columns_say_what_rows_say(shared, rows, form):
    shared.drop_topic("t", missing_ok=True)
    topic = shared.create_topic("t", value_schema={
        "id": "int64", "x": "float64?", "value": "string?", "day": "date32?",
        "at": "timestamp[us, tz=UTC]?", "raw": "binary?", "tags": "list<item: string>?",
        "doc": "json?",
    })  # fmt: skip
    with shared.transaction() as txn:
        for row in rows:
            txn.send(topic, row, key="k")
    messages = topic.consumer().poll(timeout=0)
    batch = topic.consumer().poll_batch(timeout=0)
    assert bytes(lines_of(batch, *form, typed=True)) == lines_of(messages, *form)
    assert len(messages) == len(batch) == len(rows)


@pytest.mark.parametrize("together", [(), ("--transaction",)])
def test_keys_and_whole_messages(typed, run, together):
    run("produce", typed, "t", "-k", "=", *together, input='k={"id": 1}\n')
    run("produce", typed, "t", "--json", *together, input=json.dumps(
        {"value": {"id": 2}, "key": "k", "headers": [["h", "x"]],
         "timestamp": "2026-01-31T12:00:00Z"}
    ))  # fmt: skip
    assert run("consume", typed, "t", "-k", "=").out.startswith('k={"id": 1, "ok": null')
    found = [json.loads(line) for line in run("consume", typed, "t", "--json").out.splitlines()]
    assert [(each["key"], each["value"]["id"]) for each in found] == [("k", 1), ("k", 2)]
    assert found[1]["headers"] == [["h", "x"]]
    assert found[1]["timestamp"] == "2026-01-31T12:00:00+00:00"
    lines = "".join(json.dumps(each) + "\n" for each in found)
    run("produce", typed, "t", "--json", input=lines)
    assert sorted(value["id"] for value in values(typed)) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"ok": true}', "'id' is not nullable"),
        ('{"id": 1, "other": 2}', "no column 'other'"),
        ('{"id": "1"}', "int64"),
        ('{"id": 1, "day": "yesterday"}', "yesterday"),
        ('{"id": 1, "at": "2026-01-31T12:00:00"}', "no time zone"),
        ('{"id": 1, "raw": "?"}', "line 2 is no message"),
        ('{"id": 1, "price": "dear"}', "'dear' is no decimal number"),
        ("7", "write an object"),
        ("{", "line 2 is no message"),
    ],
)
def test_what_is_no_row_is_named_with_its_line(typed, fail, line, said):
    said_there = fail("produce", typed, "t", input=f'{{"id": 1}}\n{line}\n')
    assert "stdin: line 2 is no message" in said_there
    assert said in said_there
    assert values(typed) == []


def test_the_columns_are_shown(typed, run):
    assert "values: (id int64, ok bool?, x double?" in run("topics", typed, "t").out
    shown = run("topics", typed, "t", "--json").json["value_schema"]
    assert (shown["id"], shown["tags"]) == ("int64", "list<item: string>?")
    run("produce", typed, "plain", "--partitions", 1, input="")
    assert run("topics", typed, "plain", "--json").json["value_schema"] is None


def test_values_get_another_schema(store, run, invoke, fail):
    run("topics", "create", store, "t", "--value-schema", "id:int32,note:string?")
    run("produce", store, "t", input='{"id": 1}\n')
    wider = "id:int64,note:string?,n:int32=7,at:timestamp[us, tz=UTC]?"
    assert "values" in run("topics", "alter", store, "t", "--value-schema", wider).out
    told = run("topics", "alter", store, "t", "--compression", "lz4", "--json").json
    assert told["value_schema"]["n"] == "int32"
    run("produce", store, "t", input='{"id": 2, "n": 1}\n{"id": 3}\n')
    nothing = {"note": None, "at": None}
    rows = [{"id": 1, "n": 7}, {"id": 2, "n": 1}, {"id": 3, "n": 7}]
    assert values(store) == [row | nothing for row in rows]
    assert "n int32 = 7" in run("topics", store, "t").out
    refused = fail("topics", "alter", store, "t", "--value-schema", "id:int64")
    assert "'note' is not in the new value schema" in refused
    wrong = invoke("topics", "alter", store, "t", "--value-schema", "id:int64,n:int8=x")
    assert (wrong.status, "--value-schema" in wrong.err) == (2, True)
