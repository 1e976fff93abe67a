"""A service with asyncio: requests place orders, and tasks ship them, each in a transaction.

A request writes its order and sends its number to a topic. Shippers have one subscription in
common: each takes a number, writes that the order was shipped and acknowledges the message.

python examples/async_shop.py [STORE]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import txnkv
import txnkv.aio

ORDERS, SHIPPERS = 200, 4


async def place(shop: txnkv.aio.AsyncClient, orders: txnkv.aio.AsyncTable, id: int) -> None:
    """One request."""
    async with shop.transaction() as txn:
        await txn.insert(orders, {"id": id, "item": f"item {id % 7}", "shipped": False})
        await txn.send("placed", str(id))


async def ship(
    shop: txnkv.aio.AsyncClient, orders: txnkv.aio.AsyncTable, shipped: list[int]
) -> None:
    """Ship until all orders are."""
    placed = await shop.topic("placed")
    async with placed.subscribe("shipping", "shared") as shipping:
        while len(shipped) < ORDERS:
            order = await shipping.receive(timeout=0.1)
            if order is not None:
                async with shop.transaction() as txn:
                    await txn.update(orders, {"id": int(order.value), "shipped": True})
                    await txn.ack(shipping, order)
                shipped.append(int(order.value))


async def main(path: str) -> None:
    schema = txnkv.Schema({"id": "int64", "item": "string", "shipped": "bool"}, primary_key=["id"])
    async with txnkv.aio.connect(path) as shop:
        orders = await shop.create_table("orders", schema)
        await shop.create_topic("placed")
        shipped: list[int] = []
        await asyncio.gather(
            *(place(shop, orders, id) for id in range(ORDERS)),
            *(ship(shop, orders, shipped) for _ in range(SHIPPERS)),
        )
        left = await orders.count(where=[("shipped", "=", False)])
        print(f"{ORDERS} orders, {len(set(shipped))} shipped by {SHIPPERS} tasks, {left} left")
        if left or sorted(shipped) != list(range(ORDERS)):
            raise SystemExit("an order was lost, or shipped twice")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(f"{folder}/store"))
