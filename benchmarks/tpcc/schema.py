"""The nine tables of TPC-C, with the columns that new-order and payment need.

Money is in cents, rates are in hundredths of a percent, so that sums are exact. History, which
has no key in TPC-C, gets one; `customer_name` is the index by name of those stores that have no
indexes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import txnkv

DISTRICTS: Final = 10


@dataclass(frozen=True)
class Scale:
    """The numbers of warehouses and of their rows; the defaults are TPC-C's.

    Attributes:
        warehouses: one for each thread.
        items: and so many rows of stock in each warehouse.
        customers: of each district.
        orders: of each district at the start; no more than customers.
    """

    warehouses: int = 4
    items: int = 100_000
    customers: int = 3000
    orders: int = 3000

    @property
    def names(self) -> int:
        """Different last names."""
        return min(self.customers, 1000)


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "int64")


def _texts(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "string")


def _table(columns: dict[str, str], *key: str) -> txnkv.Schema:
    return txnkv.Schema(dict(columns), primary_key=list(key))


DIST: Final = [f"s_dist_{number:02d}" for number in range(1, DISTRICTS + 1)]

TABLES: Final[dict[str, txnkv.Schema]] = {
    "warehouse": _table(_integers("w_id") | _texts("w_name") | _integers("w_tax", "w_ytd"), "w_id"),
    "district": _table(
        _integers("d_w_id", "d_id") | _texts("d_name") | _integers("d_tax", "d_ytd", "d_next_o_id"),
        "d_w_id",
        "d_id",
    ),
    "customer": _table(
        _integers("c_w_id", "c_d_id", "c_id")
        | _texts("c_first", "c_middle", "c_last", "c_credit")
        | _integers("c_discount", "c_balance", "c_ytd_payment", "c_payment_cnt")
        | _texts("c_data"),
        "c_w_id",
        "c_d_id",
        "c_id",
    ),
    "customer_name": _table(
        _integers("c_w_id", "c_d_id") | _texts("c_last", "c_first") | _integers("c_id"),
        "c_w_id",
        "c_d_id",
        "c_last",
        "c_first",
        "c_id",
    ),
    "history": _table(
        _integers(
            "h_id", "h_c_id", "h_c_d_id", "h_c_w_id", "h_d_id", "h_w_id", "h_date", "h_amount"
        )
        | _texts("h_data"),
        "h_id",
    ),
    "orders": _table(
        _integers("o_w_id", "o_d_id", "o_id", "o_c_id", "o_entry_d", "o_ol_cnt", "o_all_local"),
        "o_w_id",
        "o_d_id",
        "o_id",
    ),
    "new_order": _table(
        _integers("no_w_id", "no_d_id", "no_o_id"), "no_w_id", "no_d_id", "no_o_id"
    ),
    "order_line": _table(
        _integers("ol_w_id", "ol_d_id", "ol_o_id", "ol_number")
        | _integers("ol_i_id", "ol_supply_w_id", "ol_quantity", "ol_amount")
        | _texts("ol_dist_info"),
        "ol_w_id",
        "ol_d_id",
        "ol_o_id",
        "ol_number",
    ),
    "item": _table(
        _integers("i_id") | _texts("i_name") | _integers("i_price") | _texts("i_data"), "i_id"
    ),
    "stock": _table(
        _integers("s_w_id", "s_i_id", "s_quantity", "s_ytd", "s_order_cnt", "s_remote_cnt")
        | _texts(*DIST, "s_data"),
        "s_w_id",
        "s_i_id",
    ),
}

_SYLLABLES: Final = ["BAR", "OUGHT", "ABLE", "PRI", "PRES", "ESE", "ANTI", "CALLY", "ATION", "EING"]


def last_name(number: int) -> str:
    """TPC-C's last name of a number from 0 to 999."""
    return "".join(_SYLLABLES[int(digit)] for digit in f"{number:03d}")
