"""The settings of writes into topics, and of the sinks of streams; see `settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from txnkv.coordinator import KEEPALIVE_TIME
from txnkv.options import Operation
from txnkv.spark import settings_options as options_
from txnkv.spark.settings import Place, refuse_times_of_others, require_rows_left
from txnkv.tables import require_operation


def writes_topic(options: Mapping[str, str]) -> bool:
    """Tell whether a topic is written, rather than a table.

    Raises:
        ValueError: options table and topic are both there, or neither.
    """
    found = options_.given(options)
    if "topic" in found and "table" in found:
        raise ValueError("options table and topic exclude each other: give one of them")
    if "topic" not in found and "table" not in found:
        raise ValueError("option table or topic is missing: say .option('table', ...)")
    return "topic" in found


@dataclass(frozen=True, kw_only=True)
class TopicWrite(Place):
    """Settings of a batch write into a topic.

    Attributes:
        timeout: seconds for a write in a transaction of its own, or None.
    """

    topic: str
    token: str | None = None
    timeout: float | None = None

    @classmethod
    def of_batch(cls, options: Mapping[str, str], *, overwrite: bool = False) -> TopicWrite:
        """The settings of a write in mode append.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense, or so does the mode.
            NotSupportedError: the path is no directory.
        """
        given = options_.named(options, options_.WRITE_TOPIC, "a write into a topic")
        path, topic = options_.place(given, "topic")
        _refuse_overwrite(topic, overwrite)
        refuse_times_of_others(given)
        return cls(
            path=path,
            topic=topic,
            token=given.get("token"),
            timeout=options_.seconds(given, "timeout"),
            keepalive_time=options_.seconds(given, "keepaliveTime") or KEEPALIVE_TIME,
        )


@dataclass(frozen=True, kw_only=True)
class StreamWrite(Place):
    """Settings of the sink of a stream: a table or a topic. Each micro batch is one transaction.

    Attributes:
        table, topic: one of them is None.
        operation: of a table: what is done with the rows.
        operation_column: of a table: the column that says it for each row; or None.
        app_id: the application that the batches count for; None for the query's id.
        checkpoint: option checkpointLocation, where it was given as one; absolute.
        overwrite: each batch replaces the rows (output mode complete).
        timeout: seconds for the transaction of a micro batch, or None.
    """

    table: str | None = None
    topic: str | None = None
    operation: Operation = "insert"
    operation_column: str | None = None
    app_id: str | None = None
    checkpoint: str | None = None
    overwrite: bool = False
    timeout: float | None = None

    @classmethod
    def of_stream(cls, options: Mapping[str, str], *, overwrite: bool = False) -> StreamWrite:
        """The settings of a sink; `overwrite` in output mode complete.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense, or so does the mode.
            NotSupportedError: the path is no directory.
        """
        if writes_topic(options):
            kind, known = "topic", options_.SINK_TOPIC
        else:
            kind, known = "table", options_.SINK_TABLE
        found = options_.given(options)
        of_spark = {name: found.pop(name, None) for name in options_.OF_SPARK}
        given = options_.named(found, known, f"a stream into a {kind}")
        path, name = options_.place(given, kind)
        operation = require_operation(given.get("operation", "insert"))
        if kind == "topic":
            _refuse_overwrite(name, overwrite)
        require_rows_left(operation, overwrite)
        column = given.get("operationColumn")
        if column is not None and "operation" in given:
            raise ValueError("options operation and operationColumn exclude each other")
        if "appId" in given and not given["appId"]:
            raise ValueError("appId is empty: name the application, or leave it out")
        return cls(
            path=path,
            table=name if kind == "table" else None,
            topic=name if kind == "topic" else None,
            operation=operation,
            operation_column=column,
            app_id=given.get("appId"),
            checkpoint=options_.location(of_spark["checkpointLocation"]),
            overwrite=overwrite,
            timeout=options_.seconds(given, "timeout"),
            keepalive_time=options_.seconds(given, "keepaliveTime") or KEEPALIVE_TIME,
        )


def _refuse_overwrite(topic: str, overwrite: bool) -> None:
    if overwrite:
        raise ValueError(
            f"a topic is only ever added to, and cannot be overwritten: write into {topic!r} in "
            "mode append; or, for the whole result of each batch, into a table"
        )
