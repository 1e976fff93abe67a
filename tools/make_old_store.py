"""Makes the store that `tests/format` keeps of a format version.

    python -m tools.make_old_store tests/format/stores

Run it once, when a version is released, and never again for that version: the test shows that
later programs read what this one wrote.
"""

from __future__ import annotations

import datetime
import decimal
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import txnkv
from txnkv.storage.directory import FORMAT_VERSION

COLUMNS = {
    "k": "string",
    "n": "int32",
    "flag": "bool?",
    "small": "int8?",
    "count": "uint64?",
    "ratio": "float64?",
    "single": "float32?",
    "data": "binary?",
    "day": "date32?",
    "at": "timestamp[us, tz=UTC]?",
    "price": "decimal128(12, 2)?",
    "tags": "list<string>?",
}


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Rows of all types, every seventh with nulls."""
    made = []
    for i in range(first, first + count):
        row: dict[str, Any] = {"k": f"key {i % 5}", "n": i}
        if i % 7:
            row |= {
                "flag": i % 2 == 0,
                "small": i % 100 - 50,
                "count": 2**64 - 1 - i,
                "ratio": i / 8,
                "single": i / 4,
                "data": bytes([i % 256, 0, 255]),
                "day": datetime.date(2026, 1, 1) + datetime.timedelta(days=i),
                "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
                + datetime.timedelta(microseconds=i),
                "price": decimal.Decimal(i) / 4,
                "tags": [f"t{j}" for j in range(i % 3)],
            }
        made.append(row)
    return made


def make(path: Path) -> dict[str, Any]:
    """A store with two tables, three commits and a rollback; what it should answer."""
    with txnkv.connect(path) as client:
        schema = txnkv.Schema(COLUMNS, primary_key=["k", "n"])
        table = client.create_table("all_types", schema, txnkv.hash_partition("k", 2))
        ranged = client.create_table(
            "ranged",
            txnkv.Schema({"id": "int64", "name": "string"}, primary_key=["id"]),
            txnkv.range_partition("id", [100, 200]),
        )
        snapshots = []
        for first in (0, 40):
            with client.transaction() as txn:
                for row in rows(first, 40):
                    txn.insert(table, row)
                for i in range(first, first + 40):
                    txn.insert(ranged, (i * 4, f"name {i}"))
            snapshots.append([int(client.snapshot().timestamp), table.count(), ranged.count()])
            if first == 0:
                client.instance.engine.flush()  # the rest stays in the commit log
        undone = client.new_transaction()
        undone.insert(table, rows(500, 1)[0])
        undone.flush()
        undone.rollback()
        client.instance.store.status.checkpoint()
        return {"rows": 80, "snapshots": snapshots}


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        expected = make(store)
        name = f"store-v{FORMAT_VERSION}"
        with tarfile.open(target / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(
                store, "store", filter=lambda info: None if "runtime/" in info.name else info
            )
    (target / f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
