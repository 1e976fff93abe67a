"""The progress of a streaming query: which it is, what a batch has read, what is in the store.

Spark hands a foreachBatch function a data frame and a number. Which query it is, is a local
property of the JVM's thread; what the query has read is in the offset log of its checkpoint, which
has a batch's end offsets before the batch begins. Both are found through the JVM, which a driver
has and a Spark Connect client does not.

A batch that is run again is one that was planned before it was committed:

    Spark     plan N, write offsets/N      run N      write commits/N      plan N + 1, ...
    store                                  COMMIT N

So Spark runs none but its last batch again. Where the store has later ones, or had this number
before Spark planned it, the checkpoint is older than the store, and its batch has other rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from txnkv.client import Client, Planning
from txnkv.coordinator import Mark
from txnkv.errors import InvalidTxnStateError, NotSupportedError
from txnkv.remote import is_address

_QUERY_ID: Final = "sql.streaming.queryId"
_CLOCKS_DIFFER: Final = timedelta(minutes=5)
"""At most, those of the store's machine and of the driver's, if they are two."""
_CLOCK_SET_BACK: Final = timedelta(seconds=2)
"""At most, unnoticed, between the plan of a batch and its commit."""


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
    running = _running(frame, id)
    if running is None:
        raise InvalidTxnStateError(f"query {id} was stopped; its batch {batch_id} is not committed")
    logged = running.offsetLog().get(batch_id)
    if not logged.isDefined():
        raise InvalidTxnStateError(
            f"the checkpoint of query {id} has no offsets of batch {batch_id}"
        )
    return list(_parsed(logged.get().offsets().iterator()))


def checkpoint_of(frame: Any) -> str | None:
    """Return where the checkpoint of a frame's query is; None where that cannot be told."""
    id = query_id(frame)
    running = None if id is None else _running(frame, id)
    return None if running is None else str(running.resolvedCheckpointRoot())


def _running(frame: Any, id: str) -> Any:
    session = frame.sparkSession
    uuid = session._jvm.java.util.UUID.fromString(id)
    return session._jsparkSession.sharedState().activeStreamingQueries().get(uuid)


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


def is_committed(client: Client, mark: Mark) -> bool:
    """Tell whether a query's batch is in the store.

    Raises:
        ValueError: the application is driven by another query; or batches before this one are
            missing, which Spark numbers without gaps; or later ones are there.
    """
    Planning.of(client).is_applied(mark.app_id, mark.version, mark.source)  # refuses another query
    last = client.applied(mark.app_id)
    if last is None:
        return False
    if last.version > mark.version:
        raise ValueError(
            f"application {mark.app_id!r} has version {last.version}, and batch {mark.version} of "
            "its query comes again, which Spark does with its last batch only. Either "
            f"{_OLDER.format(app=mark.app_id)}; or another driver of this query has gone on: "
            "leave it to that one"
        )
    if last.version < mark.version - 1:
        raise ValueError(
            f"application {mark.app_id!r} has version {last.version}, and batch {mark.version} of "
            f"its query comes next: batches {last.version + 1} to {mark.version - 1} are not in "
            "the store. Either it was restored to an earlier time, or they went elsewhere. Restore "
            "the query's checkpoint to that time too; or go on without them, after "
            f"client.forget_applied({mark.app_id!r})"
        )
    return last.version == mark.version


_OLDER: Final = (
    "the query's checkpoint is older than the store (restored from a backup, say), and has other "
    "rows in its batches than were committed: put back the newer checkpoint; or write again what "
    "was read since, after client.forget_applied({app!r})"
)


def require_replay(client: Client, mark: Mark, checkpoint: str | None) -> None:
    """Refuse a batch of a committed number which Spark planned when the number was committed.

    Args:
        client: of the store.
        mark: the batch.
        checkpoint: of its query; nothing is refused where it is None, or cannot be read here.

    Raises:
        ValueError: it is another batch than the one that is there.
    """
    last, planned = client.applied(mark.app_id), _planned(checkpoint, mark.version)
    if last is None or last.version != mark.version or planned is None:
        return
    committed = last.commit_ts.datetime
    if planned > committed + (_CLOCKS_DIFFER if is_address(client.path) else _CLOCK_SET_BACK):
        raise ValueError(
            f"batch {mark.version} of application {mark.app_id!r} was committed at "
            f"{committed.isoformat()}, and that of checkpoint {checkpoint} was planned later, at "
            f"{planned.isoformat()}: {_OLDER.format(app=mark.app_id)}. Or a clock was set back "
            "between its plan and its commit, and it is the batch that is there: give the "
            f"checkpoint the file commits/{mark.version} that Spark had no time to write, like the "
            "one before it, and the query goes on behind the batch"
        )


def _planned(checkpoint: str | None, batch: int) -> datetime | None:
    """The time when Spark planned a batch, by the offset log of a checkpoint in the file system."""
    if checkpoint is None:
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError):  # not ours to judge
        log = Path(checkpoint.removeprefix("file:"), "offsets", str(batch)).read_text()
        millis = json.loads(log.splitlines()[1])["batchTimestampMs"]
        return datetime.fromtimestamp(millis / 1000, UTC)
    return None


def lag(progress_or_query: Any, topic: str | None = None) -> dict[int, int]:
    """Offsets that a query has not read yet, by partition, as of its last progress.

    Args:
        progress_or_query: a `StreamingQuery`, or a `StreamingQueryProgress` of one.
        topic: the topic's name; None where the query reads one topic.

    Returns:
        The lags, none of them when there was no progress yet.

    Raises:
        ValueError: the query does not read this topic; or several, and none is named.
    """
    progress = getattr(progress_or_query, "lastProgress", progress_or_query)
    if progress is None:
        return {}
    found = [each for each in _sources(progress) if topic in (None, each[0]["topic"])]
    if len({end["topic"] for end, _ in found}) != 1:
        named = "a txnkv topic" if topic is None else f"topic {topic!r}"
        several = ", ".join(sorted({end["topic"] for end, _ in found}))
        raise ValueError(
            f"the query reads the topics {several}: name one" if several else
            f"the query does not read {named}"
        )  # fmt: skip
    lags: dict[int, int] = {}
    for end, latest in found:
        for number, offset in latest["offsets"].items():
            behind = max(offset - end["offsets"].get(number, 0), 0)
            lags[int(number)] = max(lags.get(int(number), 0), behind)
    return lags


def _sources(progress: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """End and latest offset of each source that is a topic."""
    for source in progress["sources"]:
        end, latest = (_offset(source[name]) for name in ("endOffset", "latestOffset"))
        if end is not None and latest is not None:
            yield end, latest


def _offset(given: Any) -> dict[str, Any] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return given if isinstance(given, dict) and {"topic", "offsets"} <= given.keys() else None
