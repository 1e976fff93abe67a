"""TPC-C's consistency conditions 1 to 4 (section 3.3.2), and totals that stores must agree in."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from .stores import TpccStore

_SUMS: Final = {
    "warehouse": ["w_ytd"],
    "district": ["d_ytd", "d_next_o_id"],
    "customer": ["c_balance", "c_ytd_payment", "c_payment_cnt"],
    "history": ["h_amount", "h_id"],
    "orders": ["o_id", "o_c_id", "o_ol_cnt", "o_all_local"],
    "new_order": ["no_o_id"],
    "order_line": ["ol_i_id", "ol_quantity", "ol_amount"],
    "stock": ["s_ytd", "s_order_cnt", "s_remote_cnt"],
}


def violations(store: TpccStore) -> list[str]:
    """Return those of conditions 1 to 4 that do not hold, in words; empty when all do."""
    district = store.all("district")
    orders, new, lines = (store.all(name) for name in ("orders", "new_order", "order_line"))
    found = []

    def expect(condition: str, ours: dict[tuple[int, ...], int], theirs: object) -> None:
        if ours != theirs:
            found.append(f"{store.name}: condition {condition} does not hold")

    warehouse = store.all("warehouse")
    expect(
        "1, w_ytd = sum(d_ytd)",
        _by(warehouse, "w", "w_ytd", "sum", 1),
        _by(district, "d", "d_ytd", "sum", 1),
    )
    last = {key: number - 1 for key, number in _by(district, "d", "d_next_o_id", "max").items()}
    expect("2, d_next_o_id - 1 = max(o_id)", last, _by(orders, "o", "o_id", "max"))
    newest = _by(new, "no", "no_o_id", "max")
    expect("2, d_next_o_id - 1 = max(no_o_id)", last, newest)
    oldest, count = _by(new, "no", "no_o_id", "min"), _by(new, "no", "no_o_id", "count")
    spans = {key: newest[key] - oldest[key] + 1 for key in newest}
    expect("3, new orders have no gaps", spans, count)
    expect(
        "4, sum(o_ol_cnt) = order lines",
        _by(orders, "o", "o_ol_cnt", "sum"),
        _by(lines, "ol", "ol_number", "count"),
    )
    return found


def _by(
    table: pa.Table, prefix: str, column: str, function: str, width: int = 2
) -> dict[tuple[int, ...], int]:
    """An aggregate of a column by warehouse (width 1) or by warehouse and district (2)."""
    first = f"{prefix}_id" if prefix == "w" else f"{prefix}_w_id"
    keys = [first, f"{prefix}_d_id" if prefix != "d" else "d_id"][:width]
    grouped = table.group_by(keys).aggregate([(column, function)])
    columns = [grouped[name].to_pylist() for name in [*keys, f"{column}_{function}"]]
    return {tuple(row[:-1]): row[-1] for row in zip(*columns, strict=True)}


def totals(store: TpccStore) -> dict[str, list[int]]:
    """Rows and sums of each table: the same in any order of the same transactions."""
    found = {}
    for name, columns in _SUMS.items():
        table = store.all(name)
        found[name] = [table.num_rows, *(pc.sum(table[column]).as_py() for column in columns)]
    return found
