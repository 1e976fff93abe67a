"""New-order and payment, as sections 2.4 and 2.5 of TPC-C have them, for any store."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

from .schema import DIST, DISTRICTS, Scale, last_name

Key = tuple[int, ...]


class Work(Protocol):
    """The operations of a transaction on a store."""

    def get(self, table: str, key: Key, *columns: str) -> tuple[Any, ...] | None:
        """These columns of a row, or None."""

    def insert(self, table: str, *row: Any) -> None:
        """A new row."""

    def update(self, table: str, key: Key, **changes: Any) -> None:
        """Change columns of a row that is there."""

    def named(self, warehouse: int, district: int, last: str) -> list[int]:
        """The ids of the customers of this name, by first name."""


class Rollback(Exception):
    """The user changed their mind: one new-order in a hundred names an unknown item."""


@dataclass(frozen=True)
class Line:
    """A line of an order: the item, the warehouse that supplies it, how many."""

    item: int
    supply: int
    quantity: int


@dataclass(frozen=True)
class NewOrder:
    """An order of a customer."""

    warehouse: int
    district: int
    customer: int
    lines: tuple[Line, ...]
    date: int

    def run(self, work: Work) -> None:
        """Do it.

        Raises:
            Rollback: an item is unknown.
        """
        home = self.warehouse, self.district
        _one(work.get("warehouse", (self.warehouse,), "w_tax"))
        _, order = _one(work.get("district", home, "d_tax", "d_next_o_id"))
        work.update("district", home, d_next_o_id=order + 1)
        _one(work.get("customer", (*home, self.customer), "c_discount", "c_last", "c_credit"))
        local = all(line.supply == self.warehouse for line in self.lines)
        work.insert("orders", *home, order, self.customer, self.date, len(self.lines), int(local))
        work.insert("new_order", *home, order)
        for number, line in enumerate(self.lines, 1):
            self._order(work, order, number, line)

    def _order(self, work: Work, order: int, number: int, line: Line) -> None:
        item = work.get("item", (line.item,), "i_price", "i_name", "i_data")
        if item is None:
            raise Rollback
        stock = line.supply, line.item
        quantity, ytd, count, remote, dist = _one(
            work.get(
                "stock",
                stock,
                "s_quantity",
                "s_ytd",
                "s_order_cnt",
                "s_remote_cnt",
                DIST[self.district - 1],
            )
        )
        left = quantity - line.quantity
        work.update(
            "stock",
            stock,
            s_quantity=left if left >= 10 else left + 91,
            s_ytd=ytd + line.quantity,
            s_order_cnt=count + 1,
            s_remote_cnt=remote + (line.supply != self.warehouse),
        )
        work.insert(
            "order_line",
            self.warehouse,
            self.district,
            order,
            number,
            line.item,
            line.supply,
            line.quantity,
            line.quantity * item[0],
            dist,
        )


@dataclass(frozen=True)
class Payment:
    """A customer pays; known by id, or by last name when `customer` is one."""

    warehouse: int
    district: int
    home_warehouse: int
    home_district: int
    customer: int | str
    amount: int
    history: int
    date: int

    def run(self, work: Work) -> None:
        """Do it."""
        here, home = (
            (self.warehouse, self.district),
            (self.home_warehouse, self.home_district),
        )
        name, ytd = _one(work.get("warehouse", here[:1], "w_name", "w_ytd"))
        work.update("warehouse", here[:1], w_ytd=ytd + self.amount)
        district, ytd = _one(work.get("district", here, "d_name", "d_ytd"))
        work.update("district", here, d_ytd=ytd + self.amount)
        customer = self.customer
        if isinstance(customer, str):
            found = work.named(*home, customer)
            customer = found[len(found) // 2]
        credit, balance, paid, count = _one(
            work.get(
                "customer",
                (*home, customer),
                "c_credit",
                "c_balance",
                "c_ytd_payment",
                "c_payment_cnt",
            )
        )
        changes: dict[str, Any] = {
            "c_balance": balance - self.amount,
            "c_ytd_payment": paid + self.amount,
            "c_payment_cnt": count + 1,
        }
        if credit == "BC":
            (data,) = _one(work.get("customer", (*home, customer), "c_data"))
            noted = (customer, *home[::-1], *here[::-1], self.amount)
            changes["c_data"] = f"{' '.join(map(str, noted))} {data}"[:500]
        work.update("customer", (*home, customer), **changes)
        work.insert(
            "history",
            self.history,
            customer,
            home[1],
            home[0],
            here[1],
            here[0],
            self.date,
            self.amount,
            f"{name}    {district}",
        )


Transaction = NewOrder | Payment


def plan(scale: Scale, warehouse: int, number: int, count: int) -> list[Transaction]:
    """Plan a round of a warehouse's terminal: as many of each transaction, in random order."""
    chance = random.Random(number * 1000 + warehouse)
    found: list[Transaction] = []
    for at in range(count):
        serial = (number * count + at) * 1000 + warehouse
        if at % 2:
            found.append(_payment(scale, warehouse, serial, chance))
        else:
            found.append(_new_order(scale, warehouse, serial, chance))
    chance.shuffle(found)
    return found


def _new_order(scale: Scale, warehouse: int, serial: int, chance: random.Random) -> NewOrder:
    items = [_nurand(8191, 1, scale.items, chance) for _ in range(chance.randint(5, 15))]
    if chance.random() < 0.01:
        items[-1] = scale.items + 1
    lines = []
    for item in items:
        supply = warehouse if chance.random() >= 0.01 else _other(scale, warehouse, chance)
        lines.append(Line(item, supply, chance.randint(1, 10)))
    customer = _nurand(1023, 1, scale.customers, chance)
    district = chance.randint(1, DISTRICTS)
    return NewOrder(warehouse, district, customer, tuple(lines), serial)


def _payment(scale: Scale, warehouse: int, serial: int, chance: random.Random) -> Payment:
    district = chance.randint(1, DISTRICTS)
    home = warehouse, district
    if chance.random() < 0.15:
        home = _other(scale, warehouse, chance), chance.randint(1, DISTRICTS)
    customer: int | str = _nurand(1023, 1, scale.customers, chance)
    if chance.random() < 0.6:
        customer = last_name(_nurand(255, 0, scale.names - 1, chance))
    amount = chance.randint(100, 5000_00)
    return Payment(warehouse, district, *home, customer, amount, serial, serial)


def _other(scale: Scale, warehouse: int, chance: random.Random) -> int:
    others = [other for other in range(1, scale.warehouses + 1) if other != warehouse]
    return chance.choice(others or [warehouse])


def _nurand(a: int, low: int, high: int, chance: random.Random) -> int:
    """TPC-C's uneven choice from low to high."""
    return ((chance.randint(0, a) | chance.randint(low, high)) + 7) % (high - low + 1) + low


def _one(found: tuple[Any, ...] | None) -> tuple[Any, ...]:
    assert found is not None, "a row that must be there is not"
    return found
