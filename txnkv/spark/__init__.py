"""PySpark reads and writes tables, in one transaction with whatever else the caller does.

    driver                 planner            tasks                        committer
    txn = new_transaction
    options(txn, ...)  ->  writer(): checks,
                           starts a job   ->  write(): stage rows under
                                              the attempt's own name   ->  commit(): these
                                                                           attempts count
    txn.commit()

Each column is another process, and a task may run twice; see `writing`, and `keepalive` for who
heartbeats meanwhile. A read is planned once: `reading` cuts one snapshot into scan tokens, and each
task opens one of them. `streams` has what begins micro batches; `foreach_batch` and
`query_progress` run in the driver. `source` is what Spark calls, with options as in `option_table`
and `settings`.

Imported before the session is made, this has Spark's workers run by the driver's Python, unless
PYSPARK_PYTHON says otherwise.

Format "txnkv" needs no registration where `pyspark_txnkv` can be imported by Spark's Python,
which it can be wherever txnkv is installed; `register` is for all other cases.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if importlib.util.find_spec("pyspark") is None:
    raise ModuleNotFoundError(
        "txnkv.spark needs pyspark 4.1 or later: pip install 'txnkv[spark]'", name="pyspark"
    )

from txnkv.client import Table, Topic
from txnkv.spark.foreach_batch import foreach_batch
from txnkv.spark.java import require_java
from txnkv.spark.query_progress import lag
from txnkv.spark.worker_client import require_open
from txnkv.transaction import Transaction

if sys.executable:
    # Spark would start the first python3 of PATH, which need not have txnkv: the virtual
    # environment that this runs in may not be activated.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

if TYPE_CHECKING:
    from txnkv.spark.source import TxnkvDataSource

__all__ = ["TxnkvDataSource", "foreach_batch", "lag", "options", "register", "require_java"]


def register(spark: Any) -> None:
    """Make format "txnkv" known to a session. It becomes that of a thread that has none.

    Args:
        spark: a `pyspark.sql.SparkSession`.
    """
    from txnkv.spark.source import TxnkvDataSource

    spark.dataSource.register(TxnkvDataSource)
    _make_active(spark)


def _make_active(session: Any = None) -> None:
    """A write finds its source by the active session of its thread, and threads that Python began
    have none. They get this one, or that of the driver.
    """
    with suppress(Exception):  # no session, or one of Spark Connect, which has no threads' sessions
        if session is None:
            session = sys.modules["pyspark.sql"].SparkSession._instantiatedSession
        sessions = session._jvm.SparkSession
        if sessions.getActiveSession().isEmpty():
            sessions.setActiveSession(session._jsparkSession)


def options(
    txn: Transaction, table: str | Table | None = None, topic: str | Topic | None = None
) -> dict[str, str]:
    """The options by which a Spark read or write joins a transaction. It is flushed: what was
    given to it comes before what Spark does. A thread without a session gets the driver's.

    Args:
        txn: an open transaction. The caller keeps it alive, and commits it when its Spark
            jobs have ended.
        table: the table to read or write; or
        topic: the topic to write to.

    Returns:
        `path` (absolute, or the address of the client's server), `table` or `topic`, and `token`,
        for `.options(**...)`. Never a credential.

    Raises:
        ValueError: not exactly one of table and topic is given.
        TableNotFoundError, TopicNotFoundError: there is no such table or topic.
        InvalidTxnStateError: the transaction is not open.
        RowErrors: rows were refused.
    """
    if (table is None) == (topic is None):
        raise ValueError("give a table or a topic, one of both")
    client = txn.connection
    if client.elsewhere is None:
        txn.context.require_open("hand it to Spark")
    else:
        require_open(txn, "hand it to Spark")
    what = (
        {"table": client.table_info(table).name}
        if table is not None
        else {"topic": client.topic_info(cast("str | Topic", topic)).name}
    )
    txn.flush()
    _make_active()
    path = client.addresses[0] if client.addresses else str(Path(client.path).resolve())
    return {"path": path, **what, "token": str(txn.serialize())}


def __getattr__(name: str) -> Any:
    """`TxnkvDataSource`, imported when asked for, since it needs all of pyspark."""
    if name == "TxnkvDataSource":
        from txnkv.spark.source import TxnkvDataSource

        return TxnkvDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
