"""Arrow data whose buffers hold what no reader takes: it is refused before anything is written."""

from __future__ import annotations

import pyarrow as pa
import pytest

import txnkv


def text() -> pa.Array:
    ends = pa.py_buffer(b"\0\0\0\0\2\0\0\0")
    return pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(b"\xff\xfe")])


def listed(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), values)


def decimal() -> pa.Array:
    raw = (10**9).to_bytes(16, "little")
    return pa.Array.from_buffers(pa.decimal128(5, 2), 1, [None, pa.py_buffer(raw)])


TIME = pa.array([86_400_000_000]).cast(pa.time64("us"))
WRONG = {
    "text": text(),
    "texts": listed(text()),
    "text in a struct": pa.StructArray.from_arrays([text()], ["a"]),
    "decimal": decimal(),
    "decimals": listed(decimal()),
    "times": listed(TIME),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_table(client: txnkv.Client, name: str) -> None:
    values = WRONG[name]
    table = client.create_table("t", txnkv.Schema({"k": "int64", "v": values.type}, ["k"]))
    with pytest.raises(txnkv.SchemaError, match="column 'v' is "):
        client.run(lambda txn: txn.write(table, pa.table({"k": [1], "v": values})))
    assert table.count() == 0


def test_a_part_of_a_larger_array(client: txnkv.Client) -> None:
    """What is wrong beside the rows that are written is none of theirs."""
    good = listed(pa.array(["a"]))
    rows = pa.table({"k": range(9), "v": pa.concat_arrays([*[good] * 8, WRONG["texts"]])})
    table = client.create_table("t", txnkv.Schema({"k": "int64", "v": "list<string>?"}, ["k"]))
    client.run(lambda txn: txn.write(table, rows[:3]))
    with pytest.raises(txnkv.SchemaError, match="column 'v' is "):
        client.run(lambda txn: txn.write(table, rows[6:]))
    assert table.scan(ordered=True).to_arrow().column("v").to_pylist() == [["a"]] * 3


def test_a_key(client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"k": "string"}, ["k"]))
    with pytest.raises(txnkv.SchemaError, match="column 'k' is string: Invalid UTF8"):
        client.run(lambda txn: txn.write(table, pa.table({"k": text()})))
    with pytest.raises(txnkv.SchemaError, match="column 'k' is string: Invalid UTF8"):
        client.run(lambda txn: txn.write(table, pa.table({"k": text()}), "delete"))


@pytest.mark.parametrize("name", WRONG)
def test_values_of_a_topic(client: txnkv.Client, name: str) -> None:
    values = WRONG[name]
    schema = {"k": "int64", "v": values.type}
    if pa.types.is_struct(values.type):
        with pytest.raises(txnkv.SchemaError, match="cannot be struct"):
            client.create_topic("e", value_schema=schema)
        return
    topic = client.create_topic("e", value_schema=schema)
    with pytest.raises(txnkv.SchemaError, match="column 'v' is "):
        client.run(lambda txn: txn.send_batch(topic, pa.table({"k": [1], "v": values})))
    assert topic.consumer().poll(timeout=0) == []
