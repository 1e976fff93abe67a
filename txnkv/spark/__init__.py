"""PySpark reads and writes tables, in one transaction with whatever else the caller does.

    driver                 planner            tasks                        committer
    txn = new_transaction
    options(txn, ...)  ->  writer(): checks,
                           starts a job   ->  write(): stage rows under
                                              the attempt's own name   ->  commit(): these
                                                                           attempts count
    txn.commit()

Each column is another process, and a task may run twice; see `writing`. A read is planned
once: `reading` cuts one snapshot into scan tokens, and each task opens one of them.

Format "txnkv" needs no registration where `pyspark_txnkv` can be imported by Spark's Python,
which it can be wherever txnkv is installed; `register` is for all other cases.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txnkv.spark.java import require_java

if importlib.util.find_spec("pyspark") is None:
    raise ModuleNotFoundError(
        "txnkv.spark needs pyspark 4.1 or later: pip install 'txnkv[spark]'", name="pyspark"
    )

if TYPE_CHECKING:
    from txnkv.spark.source import TxnkvDataSource
    from txnkv.table import Table
    from txnkv.transaction import Transaction

__all__ = ["TxnkvDataSource", "options", "register", "require_java"]


def register(spark: Any) -> None:
    """Make format "txnkv" known to a session.

    Args:
        spark: a `pyspark.sql.SparkSession`.
    """
    from txnkv.spark.source import TxnkvDataSource

    spark.dataSource.register(TxnkvDataSource)


def options(txn: Transaction, table: str | Table) -> dict[str, str]:
    """The options by which a Spark read or write joins a transaction.

    Args:
        txn: an open transaction. The caller keeps it alive, and commits it when its Spark
            jobs have ended.
        table: the table to read or write.

    Returns:
        `path` (absolute), `table` and `token`, for `.options(**...)`.

    Raises:
        TableNotFoundError: there is no such table.
        InvalidTxnStateError: the transaction is not open.
    """
    txn.context.require_open("hand it to Spark")
    return {
        "path": str(Path(txn.client.path).resolve()),
        "table": txn.client.table_info(table).name,
        "token": str(txn.serialize()),
    }


def __getattr__(name: str) -> Any:
    """`TxnkvDataSource`, imported when asked for, since it needs all of pyspark."""
    if name == "TxnkvDataSource":
        from txnkv.spark.source import TxnkvDataSource

        return TxnkvDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
