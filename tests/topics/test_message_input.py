"""Messages of Python's values become Arrow: few of them, and many bytes."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from txnkv.topics.messages import message_input
from txnkv.topics.messages.message_input import outgoing

MANY = 40_000


class _Counted:
    """pyarrow, whose `array` takes note of the bytes that it copies at once."""

    def __init__(self) -> None:
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pa, name)

    def array(self, values: list[Any], *args: Any) -> pa.Array:
        made = pa.array(values, *args)
        self.most = max(self.most, made.nbytes)
        return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    counted = _Counted()
    monkeypatch.setattr(message_input, "pa", counted)
    return counted


def rows_of(kind: str, count: int, size: int) -> tuple[list[Any], dict[str, list[Any]]]:
    """Messages as they wait, and their columns."""
    dice = random.Random(count)
    value: list[Any] = [dice.randbytes(dice.randrange(2 * size)) for _ in range(count)]
    if kind == "values":
        return value, {"value": value}
    value[1::3] = [None] * len(value[1::3])
    key = [b"%d" % i if i % 5 else None for i in range(count)]
    if kind == "keys":
        return [*zip(value, key, strict=True)], {"value": value, "key": key}
    headers = [dice.randbytes(size // 2) if i % 2 else None for i in range(count)]
    time = [i if i % 2 else None for i in range(count)]
    rows = [
        (value[i], key[i], None, headers[i], time[i]) if i % 2 else (value[i], key[i])
        for i in range(count)
    ]
    return rows, {"value": value, "key": key, "headers": headers, "timestamp": time}


@pytest.mark.parametrize("kind", ["values", "keys", "all"])
@pytest.mark.parametrize(("count", "size"), [(10, 10), (100, MANY), (20_000, 500), (2, 1 << 22)])
def test_it_is_as_the_messages_are(kind: str, count: int, size: int, counted: _Counted) -> None:
    rows, columns = rows_of(kind, count, size)
    (made,) = outgoing(rows)
    made.messages.validate(full=True)
    if "timestamp" in columns:
        stamps = made.messages["timestamp"].cast("int64").to_pylist()
        assert stamps == columns.pop("timestamp")
    for name, values in columns.items():
        assert made.messages[name].to_pylist() == values
    assert made.partitions is None
    assert counted.most < message_input._MANY_BYTES + 100 * count, "others wait for `pa.array`"


def test_more_than_offsets_reach_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_input, "_MOST_BYTES", 3 << 20)
    rows, columns = rows_of("all", 300, MANY)
    made = [each.messages for each in outgoing(rows)]
    assert len(made) > 1
    assert all(each["value"].nbytes + each["headers"].nbytes <= 6 << 20 for each in made)
    for name in ("value", "key", "headers"):
        assert [value for each in made for value in each[name].to_pylist()] == columns[name]


class _Short(bytes):
    def __len__(self) -> int:
        return 3


def test_a_length_that_is_not_true_moves_no_other_message() -> None:
    values = [_Short(b"A" * 1000), b"second" * 300_000, b"third"]
    (made,) = outgoing(list(values))
    assert made.messages["value"].to_pylist() == values
