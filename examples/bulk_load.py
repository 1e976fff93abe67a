"""A million rows in, a filtered scan out.

python examples/bulk_load.py [STORE]
"""

from __future__ import annotations

import sys
import tempfile
import time

import pyarrow as pa
import pyarrow.compute as pc

import txnkv

ROWS = 1_000_000


def main(path: str) -> None:
    rows = pa.table(
        {
            "id": pc.cast(pc.sort_indices(pc.random(ROWS)), pa.int64()),  # in no order
            "price": pc.multiply(pc.random(ROWS), 100.0),
            "amount": pa.repeat(1, ROWS),
        }
    )
    with txnkv.connect(path) as client:
        schema = txnkv.Schema.from_arrow(rows.schema, primary_key=["id"])
        sales = client.create_table("sales", schema, exists_ok=True)

        begin = time.perf_counter()
        with client.transaction(timeout=None) as txn:
            written = txn.write(sales, rows, op="insert_ignore")
        seconds = time.perf_counter() - begin
        print(
            f"{written.inserted:,} rows in {seconds:.2f} s, {written.ignored:,} were there already"
        )

        begin = time.perf_counter()
        dear = sales.scan(columns=["id", "price"], where=[("price", ">", 99)]).to_arrow()
        print(f"{dear.num_rows:,} of them above 99, in {time.perf_counter() - begin:.3f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")
