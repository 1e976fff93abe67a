"""Consume, transform, keep state, produce, acknowledge: one commit, and the worker is killed.

Orders come in a topic. A worker adds each to its customer's account, which is a row of a table,
sends a receipt to another topic and acknowledges the order, all in one transaction. So whatever
happens to the worker, an order is billed once: it is acknowledged exactly when its receipt and
its customer's new total are there.

This program kills the worker again and again, whatever it is doing, and counts in the end.

python examples/billing.py [--large] [--buffer sidecar] [--orders N] [--kills N] [STORE]
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import IO, Any, Literal, cast

import txnkv

CUSTOMERS = 20


def work(path: str, batch: int, large: bool) -> None:
    """Bill orders for ever, and say after each round how many."""
    with txnkv.connect(path, create=False) as client:
        billing = client.topic("orders").subscribe("billing")
        while True:
            orders = billing.receive_many(batch, timeout=0.5)

            def bill(txn: txnkv.Transaction, orders: list[txnkv.Message] = orders) -> None:
                if large:
                    txn.serialize()  # others may join it by this token: it is written as it goes
                customers = {customer_of(order) for order in orders}
                accounts = {name: txn.get("accounts", name) or new(name) for name in customers}
                for order in orders:
                    account = accounts[customer_of(order)]
                    account["total"] += int(order.value)
                    account["orders"] += 1
                    receipt = "{customer}: order {orders}, {total} in all".format(**account)
                    txn.send("receipts", receipt, key=order.key)
                for account in accounts.values():
                    txn.upsert("accounts", account)
                txn.ack(billing, orders)

            # What a dead worker left open holds its orders until this time is over.
            if orders:
                client.run(bill, timeout=3.0)
            print("billed", len(orders), flush=True)


def customer_of(order: txnkv.Message) -> str:
    return (order.key or b"").decode()


def new(customer: str) -> dict[str, Any]:
    return {"customer": customer, "total": 0, "orders": 0}


def main(
    path: str, orders: int, kills: int, large: bool, buffer: Literal["marker", "sidecar"]
) -> None:
    with txnkv.connect(path) as client:
        schema = {"customer": "string", "total": "int64", "orders": "int64"}
        accounts = client.create_table("accounts", txnkv.Schema(schema, primary_key=["customer"]))
        incoming = client.create_topic("orders", partitions=2, buffer=buffer)
        receipts = client.create_topic("receipts", partitions=2, buffer=buffer)
        owed: Counter[str] = Counter()
        with client.transaction() as txn:
            for _ in range(orders):
                customer, amount = f"customer {random.randrange(CUSTOMERS)}", random.randrange(100)
                txn.send(incoming, str(amount), key=customer)
                owed[customer] += amount

        consumer = receipts.consumer()
        found: Counter[bytes] = Counter()
        batch = max(1, orders // (kills + 1) // 10)
        killed = 0
        while found.total() < orders:
            worker = start(path, batch, large)
            told = cast("IO[str]", worker.stdout)
            # Late enough that it has begun, early enough that it has not done.
            rounds = random.randrange(1, 6) if killed < kills else orders
            while rounds and found.total() < orders and told.readline():
                rounds -= 1
                found.update(message.value for message in consumer.poll(timeout=0))
            time.sleep(random.uniform(0, 0.02))
            worker.kill()
            worker.communicate()
            killed += 1
            found.update(message.value for message in consumer.poll(timeout=0))

        found.update(message.value for message in consumer.poll(max_messages=orders, timeout=0.1))
        totals = {row["customer"]: row["total"] for row in accounts.scan()}
        print(f"{orders:,} orders, the worker was killed {killed} times")
        print(f"{found.total():,} receipts, {len(found):,} different ones")
        print(f"{sum(totals.values()):,} owed, {sum(owed.values()):,} expected")
        if found.total() != orders or len(found) != orders or totals != +owed:
            raise SystemExit("an effect was lost or came twice")


def start(path: str, batch: int, large: bool) -> subprocess.Popen[str]:
    how = ["--large"] if large else []
    command = [sys.executable, __file__, "--work", str(batch), *how, path]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", nargs="?")
    parser.add_argument("--orders", type=int, default=500)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="transactions that others may join")
    parser.add_argument("--buffer", choices=["marker", "sidecar"], default="marker")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.store, args.work, args.large)
    elif args.store:
        main(args.store, args.orders, args.kills, args.large, args.buffer)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store", args.orders, args.kills, args.large, args.buffer)
