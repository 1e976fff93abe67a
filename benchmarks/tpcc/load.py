"""The content of the tables before the first transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .schema import DIST, DISTRICTS, TABLES, Scale, last_name

_LETTERS: Final = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", np.uint8)
_NEW_ORDERS: Final = 0.3
"""The share of orders that is not delivered yet: the last 900 of 3,000."""

_START_YTD: Final = 30_000_00


def population(scale: Scale) -> Iterator[tuple[str, pa.Table]]:
    """Each table with its rows, sorted by key; some come in several parts."""
    chance = np.random.default_rng(42)
    yield "item", _table("item", _items(scale, chance))
    for warehouse in range(1, scale.warehouses + 1):
        yield "warehouse", _table("warehouse", _warehouse(warehouse, chance))
        yield "stock", _table("stock", _stock(warehouse, scale, chance))
        for district in range(1, DISTRICTS + 1):
            yield "district", _table("district", _district(warehouse, district, scale, chance))
            customers = _table("customer", _customers(warehouse, district, scale, chance))
            yield "customer", customers
            yield "customer_name", _by_name(customers)
            yield from _orders(warehouse, district, scale, chance)


def _table(name: str, columns: dict[str, Any]) -> pa.Table:
    return pa.table(columns, schema=TABLES[name].arrow)


def _text(chance: np.random.Generator, count: int, length: int) -> pa.StringArray:
    """Random letters, `length` of them for each of `count` rows."""
    letters = _LETTERS[chance.integers(0, len(_LETTERS), count * length)]
    offsets = np.arange(0, count * length + 1, length, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(letters))


def _same(value: int, count: int) -> np.ndarray:
    return np.full(count, value, np.int64)


def _items(scale: Scale, chance: np.random.Generator) -> dict[str, Any]:
    count = scale.items
    return {
        "i_id": np.arange(1, count + 1),
        "i_name": _text(chance, count, 18),
        "i_price": chance.integers(100, 10_001, count),
        "i_data": _text(chance, count, 38),
    }


def _warehouse(warehouse: int, chance: np.random.Generator) -> dict[str, Any]:
    return {
        "w_id": [warehouse],
        "w_name": _text(chance, 1, 8),
        "w_tax": chance.integers(0, 2001, 1),
        "w_ytd": [_START_YTD * DISTRICTS],
    }


def _stock(warehouse: int, scale: Scale, chance: np.random.Generator) -> dict[str, Any]:
    count = scale.items
    return {
        "s_w_id": _same(warehouse, count),
        "s_i_id": np.arange(1, count + 1),
        "s_quantity": chance.integers(10, 101, count),
        "s_ytd": _same(0, count),
        "s_order_cnt": _same(0, count),
        "s_remote_cnt": _same(0, count),
        **{name: _text(chance, count, 24) for name in DIST},
        "s_data": _text(chance, count, 38),
    }


def _district(
    warehouse: int, district: int, scale: Scale, chance: np.random.Generator
) -> dict[str, Any]:
    return {
        "d_w_id": [warehouse],
        "d_id": [district],
        "d_name": _text(chance, 1, 8),
        "d_tax": chance.integers(0, 2001, 1),
        "d_ytd": [_START_YTD],
        "d_next_o_id": [scale.orders + 1],
    }


def _customers(
    warehouse: int, district: int, scale: Scale, chance: np.random.Generator
) -> dict[str, Any]:
    count = scale.customers
    numbers = np.arange(count)
    more = chance.integers(0, scale.names, count)
    names = [last_name(number) for number in range(scale.names)]
    bad = chance.random(count) < 0.1
    return {
        "c_w_id": _same(warehouse, count),
        "c_d_id": _same(district, count),
        "c_id": numbers + 1,
        "c_first": _text(chance, count, 12),
        "c_middle": pa.array(["OE"] * count),
        "c_last": pc.take(pa.array(names), pa.array(np.where(numbers < 1000, numbers, more))),
        "c_credit": pa.array(np.where(bad, "BC", "GC").tolist()),
        "c_discount": chance.integers(0, 5001, count),
        "c_balance": _same(-10_00, count),
        "c_ytd_payment": _same(10_00, count),
        "c_payment_cnt": _same(1, count),
        "c_data": _text(chance, count, 400),
    }


def _by_name(customers: pa.Table) -> pa.Table:
    names = customers.select(TABLES["customer_name"].arrow.names)
    return names.sort_by([(name, "ascending") for name in ("c_last", "c_first", "c_id")])


def _orders(
    warehouse: int, district: int, scale: Scale, chance: np.random.Generator
) -> Iterator[tuple[str, pa.Table]]:
    count = scale.orders
    orders = np.arange(1, count + 1)
    lines = chance.integers(5, 16, count)
    yield (
        "orders",
        _table(
            "orders",
            {
                "o_w_id": _same(warehouse, count),
                "o_d_id": _same(district, count),
                "o_id": orders,
                "o_c_id": chance.permutation(scale.customers)[:count] + 1,
                "o_entry_d": _same(0, count),
                "o_ol_cnt": lines,
                "o_all_local": _same(1, count),
            },
        ),
    )
    new = orders[int(count * (1 - _NEW_ORDERS)) :]
    yield (
        "new_order",
        _table(
            "new_order",
            {
                "no_w_id": _same(warehouse, len(new)),
                "no_d_id": _same(district, len(new)),
                "no_o_id": new,
            },
        ),
    )
    total = int(lines.sum())
    yield (
        "order_line",
        _table(
            "order_line",
            {
                "ol_w_id": _same(warehouse, total),
                "ol_d_id": _same(district, total),
                "ol_o_id": np.repeat(orders, lines),
                "ol_number": np.concatenate([np.arange(1, n + 1) for n in lines.tolist()]),
                "ol_i_id": chance.integers(1, scale.items + 1, total),
                "ol_supply_w_id": _same(warehouse, total),
                "ol_quantity": _same(5, total),
                "ol_amount": chance.integers(1, 10_000_00, total),
                "ol_dist_info": _text(chance, total, 24),
            },
        ),
    )
