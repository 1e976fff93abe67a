"""The streaming query whose batch this is, as a foreachBatch function finds it.

Spark hands such a function a data frame and a number. Which query it is, is a local property of
the JVM's thread; what the query has read is in the offset log of its checkpoint, which has a
batch's end offsets before the batch begins. Both are found through the JVM, which a driver has
and a Spark Connect client does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from txnkv.errors import InvalidTxnStateError, NotSupportedError

_QUERY_ID: Final = "sql.streaming.queryId"


def query_id(frame: Any) -> str | None:
    """Return the id of the query that hands over this data frame; None where it cannot be told."""
    try:
        context = frame.sparkSession.sparkContext
    except Exception:  # Spark Connect refuses in several ways, by version
        return None
    found = context.getLocalProperty(_QUERY_ID)
    return None if found is None else str(found)


def end_offsets(frame: Any, batch_id: int) -> list[dict[str, Any]]:
    """Return the end of a batch in each source whose offsets are JSON objects.

    Args:
        frame: that the query handed over for this batch.
        batch_id: the batch.

    Raises:
        NotSupportedError: there is no JVM to ask, as under Spark Connect.
        InvalidTxnStateError: the query does not run any more.
    """
    id = query_id(frame)
    if id is None:
        raise NotSupportedError(
            "what a batch has read cannot be told here: the function does not run in the driver "
            "of its query (Spark Connect, or PYSPARK_PIN_THREAD=false). Leave out subscription=, "
            "and acknowledge in fn"
        )
    session = frame.sparkSession
    uuid = session._jvm.java.util.UUID.fromString(id)
    running = session._jsparkSession.sharedState().activeStreamingQueries().get(uuid)
    if running is None:
        raise InvalidTxnStateError(f"query {id} was stopped; its batch {batch_id} is not committed")
    logged = running.offsetLog().get(batch_id)
    if not logged.isDefined():
        raise InvalidTxnStateError(
            f"the checkpoint of query {id} has no offsets of batch {batch_id}"
        )
    return list(_parsed(logged.get().offsets().iterator()))


def _parsed(offsets: Any) -> Iterator[dict[str, Any]]:
    while offsets.hasNext():
        offset = offsets.next()
        if offset.isDefined():
            try:
                found = json.loads(offset.get().json())
            except ValueError:
                continue  # of a source that has its own way
            if isinstance(found, dict):
                yield found
